// Room: backend/cuda. Kernels are made for each head dimension; this chooses. Host code only.
#pragma once

#include "base/check.h"

namespace pliant::cuda {

/// Calls launch.operator()<D>() with the head dimension as a constant; of others nothing is made,
/// and AllocatePages has refused them.
template <typename Launch>
void ForHeadDim(int head_dim, Launch&& launch) {
  switch (head_dim) {
    case 32:
      return launch.template operator()<32>();
    case 64:
      return launch.template operator()<64>();
    case 128:
      return launch.template operator()<128>();
    case 256:
      return launch.template operator()<256>();
  }
  CheckFailed(__FILE__, __LINE__, "head_dim", "no kernel for this head dimension");
}

}  // namespace pliant::cuda
