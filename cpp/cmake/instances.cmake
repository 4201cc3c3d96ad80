# THE list of built kernel families: a family holds all tile configurations for its weight packing, activation type and
# scale mode. Translation units, written into the build tree, have one family or several.
set(QCUTLASS_INSTANCES "")
foreach(packing w4a16:kW4A16 w8a16:kW8A16)
  foreach(activation f16:kFloat16 bf16:kBFloat16)
    foreach(mode native:kNative fine:kFine float:kFloat minimum:kMinimum)
      list(APPEND QCUTLASS_INSTANCES "${packing}/${activation}/${mode}")
    endforeach()
  endforeach()
endforeach()
foreach(activation f16:kFloat16 bf16:kBFloat16)
  list(APPEND QCUTLASS_INSTANCES
    "e2m1a16:kE2M1A16/${activation}/fine:kFine" "e2m1a16:kE2M1A16/${activation}/float:kFloat"
    "e4m3a16:kE4M3A16/${activation}/native:kNative" "e4m3a16:kE4M3A16/${activation}/float:kFloat")
endforeach()
foreach(mode block:kBlock block64:kBlock64 block32:kBlock32)
  list(APPEND QCUTLASS_INSTANCES "w8a8:kW8A8/s8:kInt8/${mode}")
endforeach()
list(APPEND QCUTLASS_INSTANCES "w8a8:kW8A8/e4m3:kFloat8E4M3/block:kBlock")
foreach(activation s8:kInt8 e4m3:kFloat8E4M3 e5m2:kFloat8E5M2)
  list(APPEND QCUTLASS_INSTANCES "w8a8:kW8A8/${activation}/none:kNone")
endforeach()
foreach(activation s8:kInt8 e4m3:kFloat8E4M3)
  list(APPEND QCUTLASS_INSTANCES
    "w4a8:kW4A8/${activation}/group:kGroup" "w4a8:kW4A8/${activation}/group32:kGroup32")
endforeach()

# Families that have configurations for sm_90a, in units of their own: all but those of small blocks.
set(QCUTLASS_WGMMA_INSTANCES ${QCUTLASS_INSTANCES})
list(FILTER QCUTLASS_WGMMA_INSTANCES EXCLUDE REGEX "kBlock[0-9]")

# Sets `name` to a family's name, `parameters` to its template parameters in namespace qcutlass.
function(qcutlass_family instance name parameters)
  string(REGEX MATCH "^(.*):(.*)/(.*):(.*)/(.*):(.*)$" match "${instance}")
  set(${name} "${CMAKE_MATCH_1}_${CMAKE_MATCH_3}_${CMAKE_MATCH_5}" PARENT_SCOPE)
  set(${parameters} "DType::${CMAKE_MATCH_4}, Packing::${CMAKE_MATCH_2}, ScaleMode::${CMAKE_MATCH_6}" PARENT_SCOPE)
endfunction()

# Families that have configurations for the rows of experts: those of 16-bit activations.
set(QCUTLASS_GROUPED_INSTANCES ${QCUTLASS_INSTANCES})
list(FILTER QCUTLASS_GROUPED_INSTANCES INCLUDE REGEX "a16:")

# Those that have configurations of wgmma for them, as Kind::takes_experts_on_wgmma says.
set(QCUTLASS_WGMMA_GROUPED_INSTANCES ${QCUTLASS_GROUPED_INSTANCES})
list(FILTER QCUTLASS_WGMMA_GROUPED_INSTANCES INCLUDE REGEX "^e|kNative|kFine")

# All kernels: templates, their headers, and the lists of families that they are instantiated for.
set(QCUTLASS_KERNELS
  Family:family.cuh:QCUTLASS_INSTANCES
  GroupedFamily:family_grouped.cuh:QCUTLASS_GROUPED_INSTANCES)
set(QCUTLASS_WGMMA_KERNELS
  WgmmaFamily:family_wgmma.cuh:QCUTLASS_WGMMA_INSTANCES
  WgmmaGroupedFamily:family_wgmma_grouped.cuh:QCUTLASS_WGMMA_GROUPED_INSTANCES)

# Sets `unit` to the name of a family's translation unit. The front end takes 7 seconds of a unit, 10 with the headers of
# wgmma, as long as some families' kernels: those share one, while none takes longer than the longest does. A family's
# kernels for experts are in its unit.
function(qcutlass_unit family suffix unit)
  string(REGEX REPLACE "_(native|fine)$" "_native_fine" name "${family}")
  string(REGEX REPLACE "^e4m3a16_.*" "e4m3a16" name "${name}")
  string(REGEX REPLACE "_(f16|bf16)_minimum$" "_minimum" name "${name}")
  string(REGEX REPLACE "_block[0-9]*$" "_blocks" name "${name}")
  string(REGEX REPLACE "^w4a8_.*" "w4a8" name "${name}")
  if(suffix STREQUAL "_sm90a")
    string(REGEX REPLACE "^(e2m1a16_(f16|bf16))_.*" "\\1" name "${name}")  # which have a loop for each type of scales
    string(REGEX REPLACE "^w8a8_.*" "w8a8" name "${name}")
    string(REGEX REPLACE "_(f16|bf16)_float$" "_float" name "${name}")
  else()
    string(REGEX REPLACE "^e2m1a16_.*" "e2m1a16" name "${name}")
  endif()
  set(${unit} "${name}${suffix}" PARENT_SCOPE)
endfunction()

# Writes the units of lists of families and sets `sources` to their paths; an unchanged unit keeps its time stamp. Each
# further argument is of QCUTLASS_KERNELS or QCUTLASS_WGMMA_KERNELS.
function(qcutlass_write_instances sources suffix)
  set(units "")
  foreach(kernels IN LISTS ARGN)
    string(REPLACE ":" ";" kernels "${kernels}")
    list(GET kernels 0 template)
    list(GET kernels 1 header)
    list(GET kernels 2 families)
    foreach(instance IN LISTS ${families})
      qcutlass_family("${instance}" family parameters)
      qcutlass_unit(${family} "${suffix}" unit)
      list(APPEND units ${unit})
      list(APPEND headers_${unit} "#include \"cuda/${header}\"\n")
      string(APPEND kernels_${unit} "template struct ${template}<${parameters}>;\n")
    endforeach()
  endforeach()
  list(REMOVE_DUPLICATES units)
  set(files "")
  foreach(unit IN LISTS units)
    list(REMOVE_DUPLICATES headers_${unit})
    string(JOIN "" headers ${headers_${unit}})
    set(file "${CMAKE_BINARY_DIR}/instances/${unit}.cu")
    file(CONFIGURE OUTPUT "${file}" @ONLY CONTENT
"// Kernel families ${unit}: written by cpp/cmake/instances.cmake.
${headers}
namespace qcutlass::cuda {
${kernels_${unit}}}
")
    list(APPEND files "${file}")
  endforeach()
  set(${sources} "${files}" PARENT_SCOPE)
endfunction()

# Writes the table of all families that launch.cu looks them up in: type, packing, mode, and whether it has
# configurations for sm_90a.
function(qcutlass_write_families file)
  set(rows "// Written by cpp/cmake/instances.cmake.\n")
  foreach(instance IN LISTS QCUTLASS_INSTANCES)
    qcutlass_family("${instance}" family parameters)
    set(wgmma false)
    if("${instance}" IN_LIST QCUTLASS_WGMMA_INSTANCES)
      set(wgmma true)
    endif()
    string(APPEND rows "kFamily<${parameters}, ${wgmma}>,\n")
  endforeach()
  file(CONFIGURE OUTPUT "${file}" @ONLY CONTENT "${rows}")
endfunction()
