// Routing, gates and sums of a mixture of experts on the host: small cases worked out by hand, and wrong arguments.
#include "qcutlass/moe.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "qcutlass/error.h"

namespace qcutlass {
namespace {

template <class Id>
void expect_routing() {
  std::vector<Id> const ids{1, 0, 0, -1, 2, 1};  // three tokens, two slots; of expert 2 of two there is none
  std::vector<float> const weights{1, 2, 3, 4, 5, 6};
  std::vector<int32_t> rows(6, 77), offsets(3, 77), order(6, 77);
  std::vector<float> row_scale(6, 77);
  RouteArguments arguments;
  arguments.tokens = 3;
  arguments.slots = 2;
  arguments.experts = 2;
  arguments.id_bytes = sizeof(Id);
  arguments.ids = ids.data();
  arguments.weights = weights.data();
  arguments.rows = rows.data();
  arguments.offsets = offsets.data();
  arguments.order = order.data();
  arguments.row_scale = row_scale.data();
  host::route(arguments);
  EXPECT_EQ(offsets, (std::vector<int32_t>{0, 2, 4}));
  EXPECT_EQ(rows, (std::vector<int32_t>{0, 1, 0, 2, 0, 0}));
  EXPECT_EQ(order, (std::vector<int32_t>{2, 0, 1, -1, -1, 3}));
  EXPECT_EQ(row_scale, (std::vector<float>{2, 3, 1, 6, 0, 0}));
}

TEST(Moe, RoutesSlotsByExpert) {
  expect_routing<int32_t>();
  expect_routing<int64_t>();
}

TEST(Moe, RoutingChecksItsArguments) {
  RouteArguments arguments;
  arguments.slots = 1;
  arguments.experts = 0;
  EXPECT_THROW(host::route(arguments), InvalidArgument);
  arguments.experts = 1;
  arguments.id_bytes = 2;
  EXPECT_THROW(host::route(arguments), InvalidArgument);
}

TEST(Moe, GatesReadHalvesAndTurns) {
  std::vector<float> const halves{0, 100, 9, 3, 2, 1}, turns{0, 3, 100, 2, 9, 1};  // gates 0, 100, 9; ups 3, 2, 1
  for (bool interleaved : {false, true}) {
    std::vector<float> out(3);
    GateRowsArguments arguments;
    arguments.rows = 1;
    arguments.columns = 3;
    arguments.type = DType::kFloat32;
    arguments.x = (interleaved ? turns : halves).data();
    arguments.x_stride = 6;
    arguments.interleaved = interleaved;
    arguments.alpha = 100.0f;  // the sigmoid is 1
    arguments.limit = 8.0f;
    arguments.up_offset = 1.0f;
    arguments.out = out.data();
    host::gate_rows(arguments, 1);
    EXPECT_EQ(out, (std::vector<float>{0, 8 * 3, 8 * 2}));
  }
}

TEST(Moe, GatesCheckTheirArguments) {
  GateRowsArguments arguments;
  arguments.columns = 1;
  arguments.type = DType::kFloat32;
  arguments.limit = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(host::gate_rows(arguments, 1), InvalidArgument);
  arguments.limit = 1.0f;
  arguments.activation = Activation::kRelu;
  EXPECT_THROW(host::gate_rows(arguments, 1), InvalidArgument);
}

TEST(Moe, SumsSlotsInTheirOrder) {
  float const large = 0x1p24f;  // to which 1 adds nothing
  std::vector<float> const y{1, large, -large, 5};
  std::vector<int32_t> const order{0, 1, 2, 1, 2, 0, -1, 3, -1, -1, -1, -1};
  std::vector<float> out(4, 77);
  SumSlotsArguments arguments;
  arguments.tokens = 4;
  arguments.slots = 3;
  arguments.columns = 1;
  arguments.type = DType::kFloat32;
  arguments.y = y.data();
  arguments.y_stride = 1;
  arguments.order = order.data();
  arguments.out = out.data();
  arguments.out_stride = 1;
  host::sum_slots(arguments, 1);
  EXPECT_EQ(out, (std::vector<float>{0, 1, 5, 0}));
}

}  // namespace
}  // namespace qcutlass
