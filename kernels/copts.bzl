"""Options of compilers that several rooms share."""

# For AVX2 and FMA whatever the rest is compiled for; entered only after the processor was asked. Highway's AVX2 target needs
# all of these. Sanitizers watch its memory on the heap, not its temporaries and arithmetic: that would make its compilation
# take minutes, and the reference runs the same rules under them.
SIMD_COPTS = [
    "-O3",
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-mbmi",
    "-mbmi2",
    "-maes",
    "-mpclmul",
    "-fno-sanitize=undefined",
]
