/* Loops of the codecs and of a save's copy that numpy and ctypes cannot run in one pass.
 *
 * Every function works on buffers of the caller and checks all lengths before it touches them. All but `survey`, which
 * is short, release the interpreter's lock while they work. tierfs/codec has the same loops in numpy, and the tests
 * compare the two byte for byte. docs/reference/FORMAT.md, "Codecs", defines the bytes. Elements are little-endian, as
 * on every machine that this file is built for.
 */
#define PY_SSIZE_T_CLEAN
#include <patchlevel.h>
#if PY_VERSION_HEX >= 0x030B0000 && !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030B0000 /* the first with buffers */
#endif
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels are for little-endian machines: tierfs works without them"
#endif

/* One version of a loop for each width of vectors. The loader picks the one that the processor supports. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define VECTORS
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { TILE = 2048, SAMPLE = 512, WINDOW = 16, SKIP = 255, SEVEN_PART = 64, PLANES_MAX = 8 };
#define HIGHEST 0x8080808080808080u
/* How elements change before they are split: the numbers of tierfs.codec.planes.PlaneOrder, and one more. */
enum { AS_IT_IS, SIGN_LAST, ZIGZAG_UPPER, ZIGZAG_WHOLE, ORDERS };

/* ---- copies ------------------------------------------------------------------------------------------------------- */

#if defined(__SSE2__)
enum { LINE = 64, PAGE = 4096, PAGES = 4 };

static inline void stream_line(uint8_t *to, const uint8_t *from)
{
    __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)from + 1);
    __m128i c = _mm_loadu_si128((const __m128i *)from + 2), d = _mm_loadu_si128((const __m128i *)from + 3);
    _mm_stream_si128((__m128i *)to, a), _mm_stream_si128((__m128i *)to + 1, b);
    _mm_stream_si128((__m128i *)to + 2, c), _mm_stream_si128((__m128i *)to + 3, d);
}
#endif

/* Copy with stores that bypass the caches: they do not read the target's lines first, and evict no other lines.
 * Four pages are copied side by side, as glibc does, so that more banks of the memory work at once. */
static void stream(uint8_t *to, const uint8_t *from, size_t length)
{
#if defined(__SSE2__)
    size_t head = (size_t)(-(uintptr_t)to & (LINE - 1));
    if (length < head + PAGES * PAGE) {
        memcpy(to, from, length);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, length -= head;
    for (; length >= PAGES * PAGE; to += PAGES * PAGE, from += PAGES * PAGE, length -= PAGES * PAGE)
        for (size_t at = 0; at < PAGE; at += LINE)
            for (size_t page = at; page < PAGES * PAGE; page += PAGE) {
                _mm_prefetch((const char *)from + page + PAGES * PAGE, _MM_HINT_T0);
                stream_line(to + page, from + page);
            }
    for (; length >= LINE; to += LINE, from += LINE, length -= LINE) stream_line(to, from);
    _mm_sfence();
#endif
    memcpy(to, from, length);
}

/* ---- elements to planes, and back --------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *elements;
    const uint8_t *base;         /* NULL for none */
    uint8_t *planes[PLANES_MAX]; /* the most significant first; NULL if not wanted; a woven pair is at its first */
    uint8_t woven;               /* bit n: lane n, from the top, is stored as 2 bytes an element */
    size_t count;
    int order;
} Parts;

/* Numbers of any alignment. */
typedef uint8_t U1;
typedef uint16_t U2 __attribute__((aligned(1), may_alias));
typedef uint32_t U4 __attribute__((aligned(1), may_alias));
typedef uint64_t U8 __attribute__((aligned(1), may_alias));

/* With order SIGN_LAST the sign of a float goes behind its exponent, which then fills a byte. */
#define EXPONENT(u) (uint8_t)((u) >> 7)
#define REST(u) (uint8_t)(((u) & 0x7F) | ((u) >> 8 & 0x80))
#define FLOAT(exponent, rest) (uint16_t)((exponent) << 7 | ((rest) & 0x7F) | ((rest) & 0x80) << 8)
#define ZIGZAG(T, x) (T)((T)((x) << 1) ^ (T)(0 - (T)((x) >> (sizeof(T) * 8 - 1))))
#define UNZIGZAG(T, x) (T)((T)((x) >> 1) ^ (T)(0 - (T)((x) & 1)))
#define LOOP for (size_t i = 0; i < n; i++)
#define UNROLLED _Pragma("GCC unroll 8")

/* A lane of 2 bytes has an upper and a lower plane. A lane of 1 byte has only a lower one. */
#define LANES(T) ((sizeof(T) + 1) / 2)
#define LOW(T, lane) (2 * (lane) + (sizeof(T) > 1))

#define CUT_AND_JOIN(T)                                                                                                \
    VECTORS static void cut_##T(const Parts *parts)                                                                    \
    {                                                                                                                  \
        uint16_t tile[TILE];                                                                                           \
        for (size_t at = 0; at < parts->count; at += TILE) {                                                           \
            size_t n = parts->count - at < TILE ? parts->count - at : TILE;                                            \
            const T *x = (const T *)parts->elements + at, *base = parts->base ? (const T *)parts->base + at : NULL;    \
            UNROLLED for (size_t number = 0; number < LANES(T); number++) {                                            \
                size_t shift = 16 * (LANES(T) - 1 - number), low = LOW(T, number);                                     \
                int is_woven = parts->woven >> number & 1, order = number || sizeof(T) == 1 ? AS_IT_IS : parts->order; \
                uint8_t *restrict lower = parts->planes[low], *restrict upper = low ? parts->planes[low - 1] : NULL;   \
                if (!upper && (!lower || is_woven)) continue;                                                          \
                U2 *restrict lane = is_woven ? (U2 *)upper + at : (U2 *)tile;                                          \
                if (!base) LOOP lane[i] = (uint16_t)(x[i] >> shift);                                                   \
                else if (parts->order == ZIGZAG_WHOLE)                                                                 \
                    LOOP lane[i] = (uint16_t)(ZIGZAG(T, (T)(x[i] - base[i])) >> shift);                                \
                else LOOP lane[i] = (uint16_t)((T)(x[i] - base[i]) >> shift);                                          \
                if (is_woven) continue;                                                                                \
                if (order == ZIGZAG_UPPER) LOOP lane[i] = ZIGZAG(uint16_t, lane[i]);                                   \
                if (upper && order == SIGN_LAST) LOOP upper[at + i] = EXPONENT(lane[i]);                               \
                else if (upper) LOOP upper[at + i] = (uint8_t)(lane[i] >> 8);                                          \
                if (lower && order == SIGN_LAST) LOOP lower[at + i] = REST(lane[i]);                                   \
                else if (lower) LOOP lower[at + i] = (uint8_t)lane[i];                                                 \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    VECTORS static void join_##T(const Parts *parts)                                                                   \
    {                                                                                                                  \
        uint16_t tiles[LANES(T)][TILE];                                                                                \
        for (size_t at = 0; at < parts->count; at += TILE) {                                                           \
            size_t n = parts->count - at < TILE ? parts->count - at : TILE;                                            \
            T *restrict x = (T *)parts->elements + at;                                                                 \
            const T *base = parts->base ? (const T *)parts->base + at : NULL;                                          \
            UNROLLED for (size_t number = 0; number < LANES(T); number++) {                                            \
                size_t low = LOW(T, number);                                                                           \
                int order = number || sizeof(T) == 1 ? AS_IT_IS : parts->order;                                        \
                uint16_t *lane = tiles[number];                                                                        \
                const uint8_t *lower = parts->planes[low] + at, *upper = low ? parts->planes[low - 1] + at : NULL;     \
                if (parts->woven >> number & 1) memcpy(lane, upper + at, 2 * n);                                       \
                else if (sizeof(T) == 1) LOOP lane[i] = lower[i];                                                      \
                else if (order == SIGN_LAST) LOOP lane[i] = FLOAT(upper[i], lower[i]);                                 \
                else LOOP lane[i] = (uint16_t)(upper[i] << 8 | lower[i]);                                              \
                if (order == ZIGZAG_UPPER) LOOP lane[i] = UNZIGZAG(uint16_t, lane[i]);                                 \
            }                                                                                                          \
            if (!base) LOOP x[i] = JOINED_##T;                                                                         \
            else if (parts->order == ZIGZAG_WHOLE) LOOP x[i] = (T)(UNZIGZAG(T, JOINED_##T) + base[i]);                 \
            else LOOP x[i] = (T)(JOINED_##T + base[i]);                                                                \
        }                                                                                                              \
    }

#define JOINED_U1 (U1)tiles[0][i]
#define JOINED_U2 tiles[0][i]
#define JOINED_U4 ((uint32_t)tiles[0][i] << 16 | tiles[1][i])
#define JOINED_U8 (((uint64_t)tiles[0][i] << 16 | tiles[1][i]) << 32 | ((uint64_t)tiles[2][i] << 16 | tiles[3][i]))
CUT_AND_JOIN(U1)
CUT_AND_JOIN(U2)
CUT_AND_JOIN(U4)
CUT_AND_JOIN(U8)

static void cut(int width, const Parts *parts)
{
    (width == 1 ? cut_U1 : width == 2 ? cut_U2 : width == 4 ? cut_U4 : cut_U8)(parts);
}

/* ---- planes ------------------------------------------------------------------------------------------------------- */

/* Return a bit for each of 64 bytes, the lowest for the first: it is set if the byte is not `most`. */
static inline uint64_t others_of(const uint8_t *bytes, uint8_t most)
{
    uint64_t bits = 0;
#if defined(__SSE2__)
    for (int i = 0; i < 4; i++) {
        __m128i same = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)bytes + i), _mm_set1_epi8((char)most));
        bits |= (uint64_t)(uint16_t)_mm_movemask_epi8(same) << 16 * i;
    }
    return ~bits;
#else
    for (int i = 0; i < 8; i++) {
        uint64_t word;
        memcpy(&word, bytes + 8 * i, 8);
        word ^= 0x0101010101010101u * most;
        word = (((word & ~HIGHEST) + ~HIGHEST) | word) & HIGHEST;
        bits |= ((word >> 7) * 0x0102040810204080u >> 56) << 8 * i;
    }
    return bits;
#endif
}

/* Pack two codes into each byte. Return how many bytes are outside the window, or -1 for more than `limit`. */
VECTORS static Py_ssize_t pack_codes(const uint8_t *plane, size_t size, uint8_t first, Py_ssize_t limit, uint8_t *positions,
                                     uint8_t *values, uint8_t *packed)
{
    uint8_t padded[64], codes[64], upper[64], pairs[32];
    Py_ssize_t outside = 0;
    memset(padded, first, 64); /* bytes behind the end have code 0 */
    memcpy(padded, plane + size / 64 * 64, size % 64);
    for (size_t at = 0; at < size; at += 64) {
        int is_whole = size - at >= 64;
        const uint8_t *source = is_whole ? plane + at : padded;
        uint8_t *target = is_whole ? packed + at / 2 : pairs;
        for (int i = 0; i < 64; i++) codes[i] = (uint8_t)(source[i] - first), upper[i] = codes[i] & 0xF0;
        for (uint64_t others = others_of(upper, 0); others; others &= others - 1) {
            if (outside == limit) return -1;
            int i = __builtin_ctzll(others);
            uint32_t position = (uint32_t)at + (uint32_t)i;
            memcpy(positions + 4 * outside, &position, 4);
            values[outside++] = source[i];
            codes[i] = 0;
        }
        for (int i = 0; i < 32; i++) target[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    }
    memcpy(packed + size / 64 * 32, pairs, (size % 64 + 1) / 2);
    return outside;
}

/* Invert `pack_codes`. Return false if a position is behind the end. */
VECTORS static int unpack_codes(const uint8_t *packed, uint8_t first, const uint8_t *positions, const uint8_t *values,
                                Py_ssize_t outside, uint8_t *plane, size_t size)
{
    for (size_t i = 0; i < size / 2; i++) {
        uint16_t both = (uint16_t)((packed[i] | packed[i] << 4) & 0x0F0F);
        plane[2 * i] = (uint8_t)((both & 0xFF) + first), plane[2 * i + 1] = (uint8_t)((both >> 8) + first);
    }
    if (size % 2) plane[size - 1] = (uint8_t)((packed[size / 2] & 0x0F) + first);
    for (Py_ssize_t i = 0; i < outside; i++) {
        uint32_t position;
        memcpy(&position, positions + 4 * i, 4);
        if (position >= size) return 0;
        plane[position] = values[i];
    }
    return 1;
}

/* Store where bytes differ from `most`, as gaps of `gap_bytes` bytes, and their values.
 * Return how many differ, or -1 for more than `limit`. */
static Py_ssize_t pack_mostly(const uint8_t *plane, size_t size, uint8_t most, Py_ssize_t limit, uint8_t *gaps,
                              size_t *gap_bytes, uint8_t *values)
{
    uint8_t padded[64];
    Py_ssize_t others = 0;
    size_t next = 0, used = 0;
    memset(padded, most, 64);
    memcpy(padded, plane + size / 64 * 64, size % 64);
    for (size_t at = 0; at < size; at += 64) {
        uint64_t differs = others_of(size - at < 64 ? padded : plane + at, most);
        for (; differs; differs &= differs - 1) {
            if (others == limit) return -1;
            size_t position = at + (size_t)__builtin_ctzll(differs), gap = position - next;
            for (; gap >= SKIP; gap -= SKIP) gaps[used++] = SKIP;
            gaps[used++] = (uint8_t)gap;
            values[others++] = plane[position];
            next = position + 1;
        }
    }
    *gap_bytes = used;
    return others;
}

/* Invert `pack_mostly`. Return false if the gaps do not fit the count or the plane. */
static int unpack_mostly(const uint8_t *gaps, size_t gap_bytes, const uint8_t *values, size_t count, uint8_t most,
                         uint8_t *plane, size_t size)
{
    size_t at = 0, used = 0;
    memset(plane, most, size);
    for (size_t i = 0; i < gap_bytes; i++) {
        at += gaps[i];
        if (gaps[i] == SKIP) continue;
        if (at >= size || used == count) return 0;
        plane[at++] = values[used++];
    }
    return used == count && (!gap_bytes || gaps[gap_bytes - 1] != SKIP);
}

/* Store seven bits of seven bytes, with an eighth byte in their highest bits. Return false if a byte has eight bits. */
VECTORS static int pack_seven(const uint8_t *plane, size_t size, uint8_t *packed)
{
    size_t part = size / SEVEN_PART * 8;
    const uint8_t *last = plane + 7 * part;
    uint8_t any = 0;
    for (size_t i = 0; i < size; i++) any |= plane[i];
    if (any & 0x80) return 0;
    UNROLLED for (size_t row = 0; row < 7; row++)
        for (size_t i = 0; i < part; i++)
            packed[row * part + i] = (uint8_t)(plane[row * part + i] | ((last[i] << (7 - row)) & 0x80));
    memcpy(packed + 7 * part, plane + 8 * part, size - 8 * part);
    return 1;
}

VECTORS static int unpack_seven(const uint8_t *packed, uint8_t *plane, size_t size)
{
    size_t part = size / SEVEN_PART * 8;
    uint8_t *last = plane + 7 * part;
    memset(last, 0, part);
    UNROLLED for (size_t row = 0; row < 7; row++)
        for (size_t i = 0; i < part; i++) {
            uint8_t byte = packed[row * part + i];
            plane[row * part + i] = byte & 0x7F;
            last[i] |= (uint8_t)((byte & 0x80) >> (7 - row));
        }
    memcpy(plane + 8 * part, packed + 7 * part, size - 8 * part);
    return 1;
}

/* ---- functions for Python ----------------------------------------------------------------------------------------- */

#define WITHOUT_LOCK(...) { Py_BEGIN_ALLOW_THREADS __VA_ARGS__; Py_END_ALLOW_THREADS }

static PyObject *refuse(const char *why)
{
    return PyErr_SetString(PyExc_ValueError, why), NULL;
}

static PyObject *py_copy(PyObject *Py_UNUSED(self), PyObject *args)
{
    unsigned long long to, from;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "KKn", &to, &from, &length)) return NULL;
    if (length < 0 || (length && (!to || !from))) return refuse("no memory to copy");
    WITHOUT_LOCK(stream((uint8_t *)(uintptr_t)to, (const uint8_t *)(uintptr_t)from, (size_t)length));
    Py_RETURN_NONE;
}

static PyObject *py_copy_each(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer table;
    if (!PyArg_ParseTuple(args, "y*", &table)) return NULL;
    const uint64_t *rows = (const uint64_t *)table.buf;
    size_t count = (size_t)table.len / (3 * sizeof *rows), missing = (size_t)table.len % (3 * sizeof *rows);
    for (size_t i = 0; i < count; i++) missing += rows[3 * i + 2] && (!rows[3 * i] || !rows[3 * i + 1]);
    if (!missing) WITHOUT_LOCK(for (size_t i = 0; i < count; i++)
        stream((uint8_t *)(uintptr_t)rows[3 * i], (const uint8_t *)(uintptr_t)rows[3 * i + 1], (size_t)rows[3 * i + 2]));
    PyBuffer_Release(&table);
    if (missing) return refuse("no memory to copy");
    Py_RETURN_NONE;
}

/* Return whether the arguments are valid. If the order changes the upper lane alone, that lane cannot be woven. */
static int is_known(int width, int order, int woven)
{
    int is_width = width == 1 || width == 2 || width == 4 || width == 8, is_upper = order == SIGN_LAST || order == ZIGZAG_UPPER;
    return is_width && order >= 0 && order < ORDERS && woven >= 0 && woven < 16 && !(width == 1 && woven) && !(is_upper && woven & 1);
}

static PyObject *py_split(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer elements, base, out;
    int width, order, woven, wanted;
    if (!PyArg_ParseTuple(args, "y*z*iiiiw*", &elements, &base, &width, &order, &woven, &wanted, &out)) return NULL;
    int is_right = is_known(width, order, woven);
    Parts parts = {.elements = elements.buf, .base = base.buf, .woven = (uint8_t)woven, .order = order};
    parts.count = is_right ? (size_t)elements.len / (size_t)width : 0;
    size_t used = 0;
    for (int p = 0; is_right && p < width; p++) {
        int is_pair = woven >> (p / 2) & 1;
        if (!(wanted >> p & 1) || (is_pair && p % 2)) continue;
        parts.planes[p] = (uint8_t *)out.buf + used;
        used += (is_pair ? 2 : 1) * parts.count;
    }
    is_right = is_right && used <= (size_t)out.len && (!base.buf || base.len >= elements.len);
    if (is_right) WITHOUT_LOCK(cut(width, &parts));
    PyBuffer_Release(&elements), PyBuffer_Release(&base), PyBuffer_Release(&out);
    if (!is_right) return refuse("elements that cannot be split like this");
    Py_RETURN_NONE;
}

/* Count every second byte of a plane, and compare it with the next: see tierfs.codec.packing.PlaneCounts. */
static PyObject *survey(const uint8_t *plane, size_t size)
{
    Py_ssize_t counts[256 + WINDOW] = {0}, squares = 0, repeated = 0, upper = 0, inside = 0, most_inside = -1;
    int most = 0, first = 0;
    for (size_t i = 0; i < size; i += 2) counts[plane[i]]++, repeated += plane[i] == plane[i + 1];
    memcpy(counts + 256, counts, WINDOW * sizeof *counts);
    for (int i = 0; i < WINDOW; i++) inside += counts[i];
    for (int i = 0; i < 256; i++) {
        squares += counts[i] * counts[i];
        if (i >= 128) upper += counts[i];
        if (counts[i] > counts[most]) most = i;
        inside += counts[i + WINDOW] - counts[i];
        if (inside > most_inside) most_inside = inside, first = (i + 1) % 256;
    }
    return Py_BuildValue("nnninin", squares, repeated, upper, most, counts[most], first, most_inside);
}

static PyObject *py_survey(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer pairs, base;
    int width, order;
    uint8_t planes[PLANES_MAX * 2 * SAMPLE];
    PyObject *found = NULL;
    if (!PyArg_ParseTuple(args, "y*z*ii", &pairs, &base, &width, &order)) return NULL;
    Parts parts = {.elements = pairs.buf, .base = base.buf, .order = order};
    int is_right = is_known(width, order, 0) && pairs.len <= 2 * SAMPLE * width && pairs.len % (2 * width) == 0;
    if (is_right && (!base.buf || base.len >= pairs.len) && (found = PyTuple_New(width))) {
        parts.count = (size_t)(pairs.len / width);
        for (int p = 0; p < width; p++) parts.planes[p] = planes + (size_t)p * parts.count;
        cut(width, &parts);
        for (int p = 0; p < width; p++) PyTuple_SetItem(found, p, survey(parts.planes[p], parts.count));
    }
    PyBuffer_Release(&pairs), PyBuffer_Release(&base);
    if (PyErr_Occurred()) return Py_XDECREF(found), NULL;
    return found ? found : refuse("pairs that cannot be surveyed");
}

static PyObject *py_merge(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer out, base, views[PLANES_MAX];
    PyObject *planes;
    int width, order, woven, got = 0;
    if (!PyArg_ParseTuple(args, "w*z*iiiO!", &out, &base, &width, &order, &woven, &PyTuple_Type, &planes)) return NULL;
    int is_right = is_known(width, order, woven) && PyTuple_Size(planes) == width && (!base.buf || base.len >= out.len);
    Parts parts = {.elements = out.buf, .base = base.buf, .woven = (uint8_t)woven, .order = order};
    parts.count = is_right ? (size_t)out.len / (size_t)width : 0;
    for (; is_right && got < width; got++) {
        if (PyObject_GetBuffer(PyTuple_GetItem(planes, got), &views[got], PyBUF_SIMPLE)) break;
        size_t bytes = !(woven >> (got / 2) & 1) ? 1 : got % 2 ? 0 : 2;
        if ((size_t)views[got].len < bytes * parts.count) is_right = 0;
        parts.planes[got] = views[got].buf;
    }
    int is_whole = is_right && got == width;
    if (is_whole) WITHOUT_LOCK((width == 1 ? join_U1 : width == 2 ? join_U2 : width == 4 ? join_U4 : join_U8)(&parts));
    while (got--) PyBuffer_Release(&views[got]);
    PyBuffer_Release(&out), PyBuffer_Release(&base);
    if (!is_whole) return PyErr_Occurred() ? NULL : refuse("planes that cannot be merged like this");
    Py_RETURN_NONE;
}

static PyObject *py_pack_codes(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer plane, positions, values, packed;
    unsigned char first;
    Py_ssize_t limit, outside = 0;
    if (!PyArg_ParseTuple(args, "y*bnw*w*w*", &plane, &first, &limit, &positions, &values, &packed)) return NULL;
    int is_right = limit >= 0 && positions.len / 4 >= limit && values.len >= limit && packed.len >= (plane.len + 1) / 2;
    if (is_right)
        WITHOUT_LOCK(outside = pack_codes(plane.buf, (size_t)plane.len, first, limit, positions.buf, values.buf, packed.buf));
    PyBuffer_Release(&plane), PyBuffer_Release(&positions), PyBuffer_Release(&values), PyBuffer_Release(&packed);
    return is_right ? PyLong_FromSsize_t(outside) : refuse("no room for codes");
}

static PyObject *py_unpack_codes(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer packed, positions, values, plane;
    unsigned char first;
    if (!PyArg_ParseTuple(args, "y*by*y*w*", &packed, &first, &positions, &values, &plane)) return NULL;
    int is_right = packed.len >= (plane.len + 1) / 2 && positions.len / 4 == values.len;
    if (is_right)
        WITHOUT_LOCK(is_right = unpack_codes(packed.buf, first, positions.buf, values.buf, values.len, plane.buf,
                                             (size_t)plane.len));
    PyBuffer_Release(&packed), PyBuffer_Release(&positions), PyBuffer_Release(&values), PyBuffer_Release(&plane);
    if (!is_right) return refuse("codes that do not fit the plane");
    Py_RETURN_NONE;
}

static PyObject *py_pack_mostly(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer plane, gaps, values;
    unsigned char most;
    Py_ssize_t limit, others = 0;
    size_t gap_bytes = 0;
    if (!PyArg_ParseTuple(args, "y*bnw*w*", &plane, &most, &limit, &gaps, &values)) return NULL;
    int is_right = limit >= 0 && values.len >= limit && gaps.len >= limit + plane.len / SKIP;
    if (is_right)
        WITHOUT_LOCK(others = pack_mostly(plane.buf, (size_t)plane.len, most, limit, gaps.buf, &gap_bytes, values.buf));
    PyBuffer_Release(&plane), PyBuffer_Release(&gaps), PyBuffer_Release(&values);
    return is_right ? Py_BuildValue("nn", others, (Py_ssize_t)gap_bytes) : refuse("no room for gaps");
}

static PyObject *py_unpack_mostly(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer gaps, values, plane;
    unsigned char most;
    int is_right;
    if (!PyArg_ParseTuple(args, "y*y*bw*", &gaps, &values, &most, &plane)) return NULL;
    WITHOUT_LOCK(is_right = unpack_mostly(gaps.buf, (size_t)gaps.len, values.buf, (size_t)values.len, most, plane.buf,
                                          (size_t)plane.len));
    PyBuffer_Release(&gaps), PyBuffer_Release(&values), PyBuffer_Release(&plane);
    if (!is_right) return refuse("gaps that do not fit");
    Py_RETURN_NONE;
}

static PyObject *py_seven(PyObject *args, int packs)
{
    Py_buffer from, to;
    if (!PyArg_ParseTuple(args, "y*w*", &from, &to)) return NULL;
    Py_ssize_t size = packs ? from.len : to.len;
    int is_right = (packs ? to.len : from.len) >= size - size / SEVEN_PART * 8, is_seven = 1;
    if (is_right)
        WITHOUT_LOCK(is_seven = packs ? pack_seven(from.buf, (size_t)size, to.buf) : unpack_seven(from.buf, to.buf, (size_t)size));
    PyBuffer_Release(&from), PyBuffer_Release(&to);
    return is_right ? PyBool_FromLong(is_seven) : refuse("no room for seven bits");
}

static PyObject *py_pack_seven(PyObject *Py_UNUSED(self), PyObject *args) { return py_seven(args, 1); }
static PyObject *py_unpack_seven(PyObject *Py_UNUSED(self), PyObject *args) { return py_seven(args, 0); }

static PyMethodDef methods[] = {
    {"copy", py_copy, METH_VARARGS, "copy(to, from, length): bytes from one address to another, past the caches."},
    {"copy_each", py_copy_each, METH_VARARGS, "copy_each(table): copy for each row of uint64 to, from and length."},
    {"split", py_split, METH_VARARGS, "split(elements, base, width, order, woven, wanted, out): the planes wanted, one after the other."},
    {"survey", py_survey, METH_VARARGS, "survey(pairs, base, width, order) -> the counts of each plane."},
    {"merge", py_merge, METH_VARARGS, "merge(out, base, width, order, woven, planes): the inverse of split."},
    {"pack_codes", py_pack_codes, METH_VARARGS, "pack_codes(plane, first, limit, positions, values, packed) -> outside, or -1."},
    {"unpack_codes", py_unpack_codes, METH_VARARGS, "unpack_codes(packed, first, positions, values, plane)."},
    {"pack_mostly", py_pack_mostly, METH_VARARGS, "pack_mostly(plane, most, limit, gaps, values) -> (others or -1, gap bytes)."},
    {"unpack_mostly", py_unpack_mostly, METH_VARARGS, "unpack_mostly(gaps, values, most, plane)."},
    {"pack_seven", py_pack_seven, METH_VARARGS, "pack_seven(plane, packed) -> whether no byte has eight bits."},
    {"unpack_seven", py_unpack_seven, METH_VARARGS, "unpack_seven(packed, plane)."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tierfs._kernels", "Loops in C: see _kernels.c.", 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
