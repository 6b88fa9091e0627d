// SwiGLU's gate: y = gate / (1 + e^-gate) · up. Bound: reads two numbers and writes one, about 20 FLOPs between.
#pragma once

#include "../native/vector.h"

namespace kvrelay {

KVR_INLINE V silu_times(V gate, V up) { return gate / (splat(1.f) + exp(V{} - gate)) * up; }

}  // namespace kvrelay
