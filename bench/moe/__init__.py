"""The block of a mixture of experts on a GPU beside others' grouped products, in one run."""
