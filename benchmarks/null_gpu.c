/* A GPU that computes nothing: CUDA's runtime, driver and cuBLAS, as far as torch and Triton call them in a training
   step. host.py adds every other function of theirs as one that returns 0. Kernels and products are counted and do
   nothing, memory is real and holds zeros, copies to and from it are made. */

#define _GNU_SOURCE
#include <driver_types.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vector_types.h>

#define OK return 0;
long null_kernels = 0, null_products = 0, null_waits = 0;
static uintptr_t handle = 4096;  /* of streams and events */
static struct { char *first, *end; int kind; } blocks[1 << 16];
static int number;

static void *take(size_t bytes, int kind) {
    bytes = bytes ? bytes : 1;
    char *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (number < 1 << 16) {
        blocks[number].first = at, blocks[number].end = at + bytes, blocks[number++].kind = kind;
    }
    return at;
}

/* The runtime */
int cudaGetDeviceCount(int *count) { *count = 1; OK }
int cudaGetDevice(int *device) { *device = 0; OK }
int cudaDriverGetVersion(int *version) { *version = VERSION; OK }
int cudaRuntimeGetVersion(int *version) { *version = VERSION; OK }
int cudaGetDeviceProperties(struct cudaDeviceProp *of, int device) {
    memset(of, 0, sizeof *of);
    strcpy(of->name, "no GPU");
    of->major = 9, of->warpSize = 32, of->multiProcessorCount = 132, of->totalGlobalMem = 149UL << 30;
    of->maxThreadsPerBlock = of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024, of->maxThreadsDim[2] = 64;
    of->maxGridSize[0] = 0x7FFFFFFF, of->maxGridSize[1] = of->maxGridSize[2] = 65535;
    of->maxThreadsPerMultiProcessor = 2048, of->maxBlocksPerMultiProcessor = 32;
    of->regsPerBlock = of->regsPerMultiprocessor = 65536, of->l2CacheSize = 50 << 20;
    of->sharedMemPerBlock = 48 << 10, of->sharedMemPerBlockOptin = 227 << 10;
    of->sharedMemPerMultiprocessor = 228 << 10;
    OK
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    struct cudaDeviceProp of;
    cudaGetDeviceProperties(&of, device);
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = of.major; break;
        case cudaDevAttrMultiProcessorCount: *value = of.multiProcessorCount; break;
        case cudaDevAttrWarpSize: *value = of.warpSize; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = of.maxThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = of.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = of.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = of.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = of.regsPerBlock; break;
        default: *value = 0;
    }
    OK
}
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; OK }
int cudaMemGetInfo(size_t *left, size_t *all) { *left = *all = 149UL << 30; OK }
int cudaMalloc(void **at, size_t bytes) { *at = take(bytes, cudaMemoryTypeDevice); OK }
int cudaMallocHost(void **at, size_t bytes) { *at = take(bytes, cudaMemoryTypeHost); OK }
int cudaHostAlloc(void **at, size_t bytes, unsigned flags) { return cudaMallocHost(at, bytes); }
int cudaPointerGetAttributes(struct cudaPointerAttributes *of, const void *at) {
    memset(of, 0, sizeof *of);
    for (int i = 0; i < number; i++)
        if ((char *)at >= blocks[i].first && (char *)at < blocks[i].end) of->type = blocks[i].kind;
    of->devicePointer = of->hostPointer = (void *)at;
    OK
}
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) { memcpy(to, from, bytes); OK }
int cudaStreamCreateWithPriority(void **made, unsigned flags, int priority) { *made = (void *)(handle += 64); OK }
int cudaEventCreateWithFlags(void **made, unsigned flags) { *made = (void *)(handle += 64); OK }
int cudaEventElapsedTime(float *ms, void *first, void *last) { *ms = 1; OK }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; OK }
int cudaStreamGetCaptureInfo(void *stream, int *status, void *id) { *status = 0; OK }
int cudaStreamSynchronize(void *stream) { null_waits++; OK }
int cudaDeviceSynchronize(void) { null_waits++; OK }
int cudaEventSynchronize(void *event) { null_waits++; OK }
int cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t bytes, void *stream) {
    null_kernels++;
    OK
}
int __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t bytes, void *stream) {
    null_kernels++;
    OK
}
int cudaLaunchKernelExC(const void *config, const void *kernel, void **args) { null_kernels++; OK }
static __thread struct { dim3 grid, block; size_t bytes; void *stream; } next;
int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes, void *stream) {
    next.grid = grid, next.block = block, next.bytes = bytes, next.stream = stream;
    OK
}
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *bytes, void **stream) {
    *grid = next.grid, *block = next.block, *bytes = next.bytes, *stream = next.stream;
    OK
}
void **__cudaRegisterFatBinary(void *binary) { static void *made[1]; return made; }
int cudaFuncGetAttributes(struct cudaFuncAttributes *of, const void *kernel) {
    memset(of, 0, sizeof *of);
    of->maxThreadsPerBlock = 1024, of->numRegs = 32;
    OK
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *kernel, int size, size_t bytes) {
    *count = 2;
    OK
}
const char *cudaGetErrorString(int error) { return "an error of no GPU"; }
int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, uint64_t flags, int *status) {
    *found = dlsym(RTLD_DEFAULT, name);
    OK
}

/* cuBLAS */
int cublasCreate_v2(void **made) { *made = take(1, 0); OK }
int cublasGemmEx(void) { null_products++; OK }
int cublasGemmStridedBatchedEx(void) { null_products++; OK }
int cublasSgemm_v2(void) { null_products++; OK }
int cublasLtMatmul(void) { null_products++; OK }
int cublasLtMatmulDescCreate(void **made) { *made = calloc(1, 512); OK }
int cublasLtMatmulDescDestroy(void *made) { free(made); OK }
int cublasLtMatrixLayoutCreate(void **made) { *made = calloc(1, 512); OK }
int cublasLtMatrixLayoutDestroy(void *made) { free(made); OK }
int cublasLtMatmulPreferenceCreate(void **made) { *made = calloc(1, 512); OK }
int cublasLtMatmulPreferenceDestroy(void *made) { free(made); OK }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int wanted,
                                   void *results, int *found) {
    memset(results, 0, 96);  /* a cublasLtMatmulHeuristicResult_t */
    *found = 1;
    OK
}

/* The driver, which Triton calls */
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; OK }
int cuDeviceGetCount(int *count) { *count = 1; OK }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);  /* which has the same numbers */
}
int cuCtxGetCurrent(void **context) { *context = &handle; OK }
int cuCtxGetDevice(int *device) { *device = 0; OK }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &handle; OK }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0, *active = 1; OK }
int cuModuleLoadData(void **module, const void *image) { *module = &handle; OK }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = &handle; OK }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 32 : 1024; OK }
int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t at) { *value = at; OK }
int cuLaunchKernel(void) { null_kernels++; OK }
int cuLaunchKernelEx(void) { null_kernels++; OK }
