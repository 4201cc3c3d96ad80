# THE list of built kernel families. Each one is a translation unit, written into the build tree: a family holds all tile
# configurations for its activation type, weight packing and scale mode.
set(QCUTLASS_INSTANCE_ACTIVATIONS f16:kFloat16 bf16:kBFloat16)
set(QCUTLASS_INSTANCE_PACKINGS w4a16:kW4A16 w8a16:kW8A16)
set(QCUTLASS_INSTANCE_MODES native:kNative fine:kFine float:kFloat)

# Writes the units and sets `sources` to their paths; an unchanged unit keeps its time stamp.
function(qcutlass_write_instances sources)
  set(units "")
  foreach(packing_pair IN LISTS QCUTLASS_INSTANCE_PACKINGS)
    foreach(act_pair IN LISTS QCUTLASS_INSTANCE_ACTIVATIONS)
      foreach(mode_pair IN LISTS QCUTLASS_INSTANCE_MODES)
        foreach(part packing act mode)
          string(REGEX MATCH "^(.*):(.*)$" match "${${part}_pair}")
          set(${part} ${CMAKE_MATCH_1})
          set(${part}_enumerator ${CMAKE_MATCH_2})
        endforeach()
        set(unit "${CMAKE_BINARY_DIR}/instances/${packing}_${act}_${mode}.cu")
        file(CONFIGURE OUTPUT "${unit}" @ONLY CONTENT
"// Kernel family ${packing}, ${act} activations, ${mode} scales: written by cpp/cmake/instances.cmake.
#include \"gemm/family.cuh\"

template struct qcutlass::cuda::Family<qcutlass::DType::${act_enumerator}, qcutlass::Packing::${packing_enumerator},
                                       qcutlass::ScaleMode::${mode_enumerator}>;
")
        list(APPEND units "${unit}")
      endforeach()
    endforeach()
  endforeach()
  set(${sources} "${units}" PARENT_SCOPE)
endfunction()
