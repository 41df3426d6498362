/* NVRTC, with which PyTorch compiles a few kernels at run time (those of complex numbers): what comes out is loaded, and never run. */
#include "card.h"

#include <stdlib.h>
#include <string.h>

enum { ROOM = 64, NAME = 512 };
static const char NOTHING[] = ".version 8.0\n";

/* A program is the names whose kernels were asked for. */
typedef struct {
    char names[ROOM][NAME];
    int num_names;
} Program;

int nvrtcVersion(int *major, int *minor) { *major = CUDA_MAJOR; *minor = 0; return 0; }
const char *nvrtcGetErrorString(int result) { return result ? "error of the simulated GPU" : "NVRTC_SUCCESS"; }
int nvrtcGetNumSupportedArchs(int *out) { *out = 1; return 0; }
int nvrtcGetSupportedArchs(int *out) { *out = card()->major * 10 + card()->minor; return 0; }
int nvrtcCreateProgram(void **out, const char *source, const char *name, int num_headers, const char *const *headers, const char *const *includes) {
    *out = calloc(1, sizeof(Program));
    return *out ? 0 : 1;
}
int nvrtcDestroyProgram(void **program) { free(*program); *program = NULL; return 0; }
int nvrtcAddNameExpression(Program *program, const char *name) {
    if (program->num_names == ROOM) return not_served("nvrtcAddNameExpression (more than 64 names)", 1);
    strncpy(program->names[program->num_names++], name, NAME - 1);
    return 0;
}
int nvrtcCompileProgram(Program *program, int num_options, const char *const *options) { return 0; }
int nvrtcGetLoweredName(Program *program, const char *name, const char **out) {
    for (int i = 0; i < program->num_names; i++)
        if (!strncmp(program->names[i], name, NAME - 1)) {
            *out = program->names[i];
            return 0;
        }
    return 10; /* NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID */
}
int nvrtcGetPTXSize(Program *program, size_t *out) { *out = sizeof NOTHING; return 0; }
int nvrtcGetPTX(Program *program, char *out) { memcpy(out, NOTHING, sizeof NOTHING); return 0; }
int nvrtcGetCUBINSize(Program *program, size_t *out) { *out = sizeof NOTHING; return 0; }
int nvrtcGetCUBIN(Program *program, char *out) { memcpy(out, NOTHING, sizeof NOTHING); return 0; }
int nvrtcGetProgramLogSize(Program *program, size_t *out) { *out = 1; return 0; }
int nvrtcGetProgramLog(Program *program, char *out) { *out = 0; return 0; }
int __nvrtcCPEx(void) { return 0; } /* how cuDNN compiles kernels, which are loaded and never run as well */
