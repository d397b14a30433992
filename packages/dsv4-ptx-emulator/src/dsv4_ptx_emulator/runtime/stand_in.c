/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stand-in for the run-time library of the CuTe DSL: what a compiled host function calls, handed on to Python.
 *
 * The names and signatures are those that the DSL declares in the LLVM module of a compiled function; nothing
 * else of the CUDA runtime is imitated. Every call goes through the table that `dsv4_emulator_install` was given.
 * Without a table a call fails with code 3 (cudaErrorInitializationError), so a function that outlives its
 * emulator cannot call into a Python object that is gone.
 *
 * Trap: `cuda_dialect_unload_library_once` runs from global destructors, possibly after the interpreter has been
 * finalised, so it must not call back.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define EXPORTED __attribute__((visibility("default")))
#define NOT_INSTALLED 3
#define MAX_BINARIES 64

typedef struct {
    int32_t (*load)(void **library, const void *image);
    int32_t (*get_kernel)(void **kernel, void *library, const char *name);
    int32_t (*launch)(const void *config, void *kernel, void **arguments);
    int32_t (*device_attribute)(int32_t *value, int32_t attribute, int32_t device);
    int32_t (*kernel_attribute)(int32_t *value, int32_t attribute, void *kernel, int32_t device);
    int32_t (*set_kernel_attribute)(void *kernel, int32_t attribute, int32_t value, int32_t device);
    int32_t (*get_device)(int32_t *device);
    int32_t (*set_device)(int32_t device);
    const char *(*message)(int32_t code);
} Callbacks;

static Callbacks callbacks;
static int installed;
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

EXPORTED void dsv4_emulator_install(const Callbacks *table) {
    installed = table != NULL;
    if (table != NULL) {
        callbacks = *table;
    }
}

#define CALL(name, ...) (installed ? callbacks.name(__VA_ARGS__) : NOT_INSTALLED)

EXPORTED int32_t _cudaLibraryLoadData(void **library, const void *image, void *jit_options, void *jit_values,
                                      int32_t jit_count, void *options, void *values, int32_t count) {
    (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    return CALL(load, library, image);
}

EXPORTED int32_t _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    return CALL(get_kernel, kernel, library, name);
}

EXPORTED int32_t _cudaLaunchKernelEx(const void *config, void *kernel, void **arguments) {
    return CALL(launch, config, kernel, arguments);
}

EXPORTED int32_t _cudaDeviceGetAttribute(int32_t *value, int32_t attribute, int32_t device) {
    return CALL(device_attribute, value, attribute, device);
}

EXPORTED int32_t _cuKernelGetAttribute(int32_t *value, int32_t attribute, void *kernel, int32_t device) {
    return CALL(kernel_attribute, value, attribute, kernel, device);
}

EXPORTED int32_t _cudaKernelSetAttributeForDevice(void *kernel, int32_t attribute, int32_t value,
                                                  int32_t device) {
    return CALL(set_kernel_attribute, kernel, attribute, value, device);
}

EXPORTED int32_t _cudaFuncSetAttribute(void *kernel, int32_t attribute, int32_t value) {
    return CALL(set_kernel_attribute, kernel, attribute, value, -1);
}

EXPORTED int32_t _cudaGetDevice(int32_t *device) { return CALL(get_device, device); }

EXPORTED int32_t _cudaSetDevice(int32_t device) { return CALL(set_device, device); }

EXPORTED const char *cuda_dialect_get_error_name(int32_t code) {
    return installed ? callbacks.message(code) : "no emulator is installed in this process";
}

/* The state word keeps the array of library handles, which the DSL's own functions fill and read. */
EXPORTED int32_t cuda_dialect_init_library_once(void **state, int32_t (*init)(void **libraries),
                                                int32_t (*load_to_device)(void **libraries, int32_t device),
                                                void (*raise)(const char *kind, const char *message)) {
    int32_t code = 0;
    pthread_mutex_lock(&loading);
    if (*state == NULL) {
        void **libraries = calloc(MAX_BINARIES, sizeof(void *));
        code = libraries == NULL ? 2 : init(libraries);
        if (code == 0) {
            code = load_to_device(libraries, 0);
        }
        if (code == 0) {
            *state = libraries;
        } else {
            free(libraries);
        }
    }
    pthread_mutex_unlock(&loading);
    if (code != 0) {
        raise("RuntimeError", cuda_dialect_get_error_name(code));
    }
    return code;
}

EXPORTED void cuda_dialect_unload_library_once(void **state) {
    pthread_mutex_lock(&loading);
    free(*state);
    *state = NULL;
    pthread_mutex_unlock(&loading);
}

EXPORTED void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *kind, const char **parts, int32_t count),
                                                 int32_t code) {
    const char *parts[1] = {cuda_dialect_get_error_name(code)};
    raise("RuntimeError", parts, 1);
}
