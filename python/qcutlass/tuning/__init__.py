"""Tuned plans: measured once by `qcutlass.tune`, remembered in a file, found when a product is first planned."""

from qcutlass.products.tuned_plans import BUCKETS, bucket, cache_folder, forget, lookup, on_change

__all__ = ["BUCKETS", "bucket", "cache_folder", "forget", "lookup", "on_change"]
