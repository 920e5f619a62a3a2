# SPDX-License-Identifier: MIT
# Writes the matrix products of a warpgroup (cuda/kernels/wgmma.cuh). The instruction has a form per type and width, each of
# which names all sums of a thread.
function(tandem_write_wgmma_shapes file)
  set(text "")
  foreach(width 32 64 80 96 112 128 192 256)
    math(EXPR n_sums "${width} / 2")
    math(EXPR last "${n_sums} - 1")
    set(names "")
    set(operands "")
    foreach(i RANGE ${last})
      list(APPEND names "%${i}")
      list(APPEND operands "\"+f\"(d[${i}])")
    endforeach()
    list(JOIN names "," names)
    list(JOIN operands ", " operands)
    foreach(i RANGE 6)
      math(EXPR p${i} "${n_sums} + ${i}")
    endforeach()
    foreach(type Half:f16 Bfloat:bf16)
      string(REPLACE ":" ";" words ${type})
      list(POP_FRONT words number ptx)
      string(APPEND text
        "template <>\nstruct Wgmma<${number}, ${width}> {\n"
        "  static __device__ void keys(float (&d)[${n_sums}], uint64_t a, uint64_t b, int adds) {\n"
        "    asm volatile(\"{\\n.reg .pred p;\\nsetp.ne.b32 p, %${p2}, 0;\\n\"\n"
        "      \"wgmma.mma_async.sync.aligned.m64n${width}k16.f32.${ptx}.${ptx} {${names}}, %${p0}, %${p1}, p, 1, 1, 0, 0;\\n}\\n\"\n"
        "      : ${operands} : \"l\"(a), \"l\"(b), \"r\"(adds));\n  }\n"
        "  static __device__ void values(float (&d)[${n_sums}], const uint32_t (&a)[4], uint64_t b) {\n"
        "    asm volatile(\"wgmma.mma_async.sync.aligned.m64n${width}k16.f32.${ptx}.${ptx} {${names}}, \"\n"
        "      \"{%${p0},%${p1},%${p2},%${p3}}, %${p4}, 1, 1, 1, 1;\\n\"\n"
        "      : ${operands} : \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"l\"(b));\n  }\n"
        "  static __device__ void rows(float (&d)[${n_sums}], const uint32_t (&a)[4], uint64_t b, int adds) {\n"
        "    asm volatile(\"{\\n.reg .pred p;\\nsetp.ne.b32 p, %${p5}, 0;\\n\"\n"
        "      \"wgmma.mma_async.sync.aligned.m64n${width}k16.f32.${ptx}.${ptx} {${names}}, \"\n"
        "      \"{%${p0},%${p1},%${p2},%${p3}}, %${p4}, p, 1, 1, 0;\\n}\\n\"\n"
        "      : ${operands} : \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"l\"(b), \"r\"(adds));\n  }\n};\n")
    endforeach()
  endforeach()
  file(CONFIGURE OUTPUT ${file} CONTENT "${text}" @ONLY)
endfunction()
