/* Copies past the processor's cache.

   A plain copy of more than the cache holds first reads the lines that it is about to overwrite; stores that go
   past the cache do not, and leave the cache to the source. So a digest finds there what was just copied.

   Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, "Non-temporal Store Instructions".
*/

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LINE_BYTES 64
/* Copied, then digested: a part of any core's cache, and no more than xxhash takes without giving up the interpreter
   lock, which a busy thread would keep for milliseconds each time. */
#define CHUNK_BYTES 65536

/* Whole lines, the target's first one at a multiple of their size. */
typedef void copy_lines_t(char *target, const char *source, size_t num_lines);

#if defined(__x86_64__)
static void copy_lines_sse2(char *target, const char *source, size_t num_lines)
{
    for (; num_lines > 0; num_lines--, target += LINE_BYTES, source += LINE_BYTES) {
        __m128i a = _mm_loadu_si128((const __m128i *)source);
        __m128i b = _mm_loadu_si128((const __m128i *)(source + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(source + 48));
        _mm_stream_si128((__m128i *)target, a);
        _mm_stream_si128((__m128i *)(target + 16), b);
        _mm_stream_si128((__m128i *)(target + 32), c);
        _mm_stream_si128((__m128i *)(target + 48), d);
    }
}

/* A line at once never waits half full: a tenth faster. */
__attribute__((target("avx512f"))) static void
copy_lines_avx512(char *target, const char *source, size_t num_lines)
{
    for (; num_lines > 0; num_lines--, target += LINE_BYTES, source += LINE_BYTES)
        _mm512_stream_si512((__m512i *)target, _mm512_loadu_si512(source));
}

static copy_lines_t *copy_lines = copy_lines_sse2;

static void choose_copy(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        copy_lines = copy_lines_avx512;
}

/* Such stores are not ordered with the others of this thread. */
static void end_copy(void) { _mm_sfence(); }
#else
static void copy_lines(char *target, const char *source, size_t num_lines)
{
    memcpy(target, source, num_lines * LINE_BYTES);
}

static void choose_copy(void) {}
static void end_copy(void) {}
#endif

static void copy(char *target, const char *source, size_t num_bytes)
{
    size_t head = -(uintptr_t)target % LINE_BYTES;
    if (head > num_bytes)
        head = num_bytes;
    size_t num_lines = (num_bytes - head) / LINE_BYTES, tail = head + num_lines * LINE_BYTES;
    memcpy(target, source, head);
    copy_lines(target + head, source + head, num_lines);
    memcpy(target + tail, source + tail, num_bytes - tail);
}

static PyObject *stream_copy(PyObject *module, PyObject *args)
{
    unsigned long long target, source;
    Py_ssize_t num_bytes;
    PyObject *update = Py_None;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKn|O:stream_copy", &target, &source, &num_bytes, &update))
        return NULL;
    if (num_bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "num_bytes is negative");
        return NULL;
    }
    char *to = (char *)(uintptr_t)target, *from = (char *)(uintptr_t)source;
    if (update == Py_None) {
        Py_BEGIN_ALLOW_THREADS
        copy(to, from, (size_t)num_bytes);
        end_copy();
        Py_END_ALLOW_THREADS
        Py_RETURN_NONE;
    }
    for (Py_ssize_t at = 0; at < num_bytes; at += CHUNK_BYTES) {
        Py_ssize_t size = num_bytes - at < CHUNK_BYTES ? num_bytes - at : CHUNK_BYTES;
        copy(to + at, from + at, (size_t)size);
        PyObject *view = PyMemoryView_FromMemory(from + at, size, PyBUF_READ);
        PyObject *result = view ? PyObject_CallFunctionObjArgs(update, view, NULL) : NULL;
        Py_XDECREF(view);
        if (result == NULL) {
            end_copy();
            return NULL;
        }
        Py_DECREF(result);
    }
    end_copy();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"stream_copy", stream_copy, METH_VARARGS,
     "stream_copy(target, source, num_bytes, update=None)\n--\n\n"
     "Copy between addresses, past the cache; see _stream_copy.pyi."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_stream_copy", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__stream_copy(void)
{
    choose_copy();
    return PyModuleDef_Init(&module);
}
