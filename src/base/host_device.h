// Room: base. A mark for functions that are compiled for the host and for CUDA devices.
#pragma once

#if defined(__CUDACC__)
#define PLIANT_HOST_DEVICE __host__ __device__
#else
#define PLIANT_HOST_DEVICE
#endif
