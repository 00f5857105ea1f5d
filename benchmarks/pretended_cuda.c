/* A CUDA runtime and driver for an H100 that computes nothing, so that torch's CUDA build starts without a card.
 *
 * `gpu_paths.py` compiles and preloads it. Streams and events are empty, page-locked memory is ordinary memory
 * whose addresses are remembered, and the properties are those of an H100 SXM. Memory of the device and kernels
 * are missing on purpose: tensors there are fake, and what would allocate or start one ends with an error. */
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY 85029158912 /* bytes of an H100 80GB HBM3 */
#define ANSWER(name, parameters, body) \
    cudaError_t name parameters { body; return cudaSuccess; }

static struct { char *start; size_t size; } locked[4096]; /* page-locked memory */

ANSWER(cudaGetDeviceCount, (int *count), *count = 1)
ANSWER(cudaGetDevice, (int *device), *device = 0)
ANSWER(cudaSetDevice, (int device), )
ANSWER(cudaDriverGetVersion, (int *version), *version = CUDART_VERSION)
ANSWER(cudaGetLastError, (void), )
ANSWER(cudaPeekAtLastError, (void), )
ANSWER(cudaFree, (void *memory), ) /* of nothing, which makes a context */
ANSWER(cudaMemGetInfo, (size_t *free, size_t *total), *free = *total = MEMORY)
ANSWER(cudaDeviceSynchronize, (void), )
ANSWER(cudaDeviceCanAccessPeer, (int *can, int one, int other), *can = 0)
ANSWER(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest), *least = 0; *greatest = -5)
ANSWER(cudaThreadExchangeStreamCaptureMode, (enum cudaStreamCaptureMode *mode), )
ANSWER(cudaStreamCreateWithPriority, (cudaStream_t *stream, unsigned flags, int priority), *stream = malloc(8))
ANSWER(cudaStreamIsCapturing, (cudaStream_t stream, enum cudaStreamCaptureStatus *status), *status = 0)
ANSWER(cudaStreamQuery, (cudaStream_t stream), )
ANSWER(cudaStreamSynchronize, (cudaStream_t stream), )
ANSWER(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags), )
ANSWER(cudaEventCreateWithFlags, (cudaEvent_t *event, unsigned flags), *event = malloc(8))
ANSWER(cudaEventDestroy, (cudaEvent_t event), free(event))
ANSWER(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), )
ANSWER(cudaEventRecordWithFlags, (cudaEvent_t event, cudaStream_t stream, unsigned flags), )
ANSWER(cudaEventQuery, (cudaEvent_t event), )
ANSWER(cudaEventSynchronize, (cudaEvent_t event), )

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *card, int device) {
    memset(card, 0, sizeof *card);
    strcpy(card->name, "no GPU but a pretended H100");
    card->major = 9, card->minor = 0;
    card->totalGlobalMem = MEMORY, card->l2CacheSize = 52428800;
    card->multiProcessorCount = 132, card->warpSize = 32;
    card->maxThreadsPerBlock = 1024, card->maxThreadsPerMultiProcessor = 2048;
    card->regsPerBlock = card->regsPerMultiprocessor = 65536;
    card->sharedMemPerBlock = 49152, card->sharedMemPerBlockOptin = 232448;
    card->sharedMemPerMultiprocessor = 233472;
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags) {
    for (int i = 0; i < 4096; i++)
        if (!locked[i].start) {
            *memory = locked[i].start = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
            locked[i].size = size;
            return cudaSuccess;
        }
    return cudaErrorMemoryAllocation;
}

cudaError_t cudaFreeHost(void *memory) {
    for (int i = 0; i < 4096; i++)
        if (locked[i].start == memory) locked[i].start = NULL;
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    memset(attributes, 0, sizeof *attributes);
    for (int i = 0; i < 4096; i++)
        if (locked[i].start <= (char *)address && (char *)address < locked[i].start + locked[i].size)
            attributes->type = cudaMemoryTypeHost;
    return cudaSuccess;
}

/* Of libcuda.so.1: the context is not there yet, so that the end of a backward pass has no streams to join. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0, *active = 0;
    return 0;
}
