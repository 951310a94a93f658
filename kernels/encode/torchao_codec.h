// Optimizer states exactly as torchao stores them: its codes and scales, bit for bit (torchao 0.18:
// optim/quant_utils.py and subclass_{8bit,4bit,fp8}.py).
//
//   format  a block's scale                  codes
//   dyn8    max(largest magnitude, 1e-12)    of x / scale, the nearest of the 256 levels of create_dynamic_map
//   dyn4    the same, for 128 elements       the nearest of 16 levels
//   fp8     that / 448                       E4M3 of x / scale, to nearest, ties to even
//   fp32    none                             the number
//
// The nearest level: the largest one that is not above y, or the next if y - level >= (next - level) * 0.5, in fp32.
// Unlike kernels/tile/states.h: values are divided by the scale, levels are torch's to the last bit, and a second
// moment may become 0. A block with a NaN gets the scale NaN, and code 0 (fp8: a code of NaN) for every element:
// torchao's codes there, but for the sign of fp8's NaN, which it leaves to the processor. Pure functions, thread-safe.
#pragma once

#include "core/format/numeric_formats.h"
#include "kernels/tile/plan.h"

namespace shardmesh {

// fp32, dyn8, dyn4 and fp8.
bool TorchaoHasStates(StateFormat format);

// A tile of kTileElements states between torchao's codes and fp32. is_signed: first moments; they have levels of their
// own. REQUIRES: TorchaoHasStates(format).
void DecodeTorchaoStates(StateFormat format, bool is_signed, const ConstStoredTile& from, float* to);
void EncodeTorchaoStates(StateFormat format, bool is_signed, const float* from, const StoredTile& to);

}  // namespace shardmesh
