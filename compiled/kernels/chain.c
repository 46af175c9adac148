/* Computes chained block hashes (`epp.prefix.blocks` has the formula), with XXH3 of 64 bits, for blocks above 240 bytes.
   Source: the specification of XXH3 in the documentation of xxHash (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md). */
#include "arrays.h"
#include <string.h>

#define CHAIN_P 0x9E3779B97F4A7C15ULL
#define DENSE_BLOCKS 64
#define WIDE ((uint64_t)1 << 16)

#define SHORT_MAX 240 /* bytes; XXH3 has other formulas for inputs up to this length */
#define STRIPE 64     /* bytes; eight lanes */
#define LANES 8
#define SECRET 192
#define STRIPES_PER_ROUND ((SECRET - STRIPE) / 8)
#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define AVALANCHE 0x165667919E3779F9ULL

static const uint64_t secret_words[SECRET / 8] = { /* XXH3's default secret as little-endian words */
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

static inline uint64_t read64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static inline void accumulate(uint64_t *lanes, const uint8_t *data, const uint8_t *secret) {
    uint64_t values[LANES], keys[LANES];
    for (int i = 0; i < LANES; i++) {
        values[i] = read64(data + 8 * i);
        keys[i] = values[i] ^ read64(secret + 8 * i);
    }
    for (int i = 0; i < LANES; i++) lanes[i] += values[i ^ 1] + (uint64_t)(uint32_t)keys[i] * (keys[i] >> 32);
}

static inline uint64_t folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* XXH3 of 64 bits; size > SHORT_MAX. */
static uint64_t xxh3(const uint8_t *data, size_t size, const uint8_t *secret) {
    uint64_t lanes[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    size_t stripes = (size - 1) / STRIPE; /* without the last stripe, which may overlap the previous one */
    for (size_t at = 0, step = 0; at < stripes; at++) {
        accumulate(lanes, data + at * STRIPE, secret + 8 * step);
        if (++step == STRIPES_PER_ROUND) {
            step = 0;
            for (int i = 0; i < LANES; i++) {
                uint64_t lane = lanes[i] ^ (lanes[i] >> 47) ^ read64(secret + SECRET - STRIPE + 8 * i);
                lanes[i] = lane * PRIME32_1;
            }
        }
    }
    accumulate(lanes, data + size - STRIPE, secret + SECRET - STRIPE - 7);
    uint64_t hash = (uint64_t)size * PRIME64_1;
    for (int i = 0; i < LANES; i += 2)
        hash += folded(lanes[i] ^ read64(secret + 11 + 8 * i), lanes[i + 1] ^ read64(secret + 19 + 8 * i));
    hash = (hash ^ (hash >> 37)) * AVALANCHE;
    return hash ^ (hash >> 32);
}

/* chain(prompt, block_bytes, start, seed, rest): returns uint64, one hash per block. `start`: the hash before the first block.
   `seed`: the seed of XXH3. `rest`: the hash of the bytes after the last whole block; unused without such bytes. */
KERNEL(chain) {
    if (!arguments("chain", count, 5)) return NULL;
    Py_ssize_t block = PyLong_AsSsize_t(args[1]);
    uint64_t link = PyLong_AsUnsignedLongLongMask(args[2]), seed = PyLong_AsUnsignedLongLongMask(args[3]),
             rest = PyLong_AsUnsignedLongLongMask(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (block <= SHORT_MAX) return PyErr_Format(PyExc_ValueError, "chain: blocks must have more than %d bytes", SHORT_MAX);
    Py_buffer prompt;
    if (PyObject_GetBuffer(args[0], &prompt, PyBUF_SIMPLE) < 0) return NULL;
    npy_intp whole = prompt.len / block, blocks = whole + (prompt.len % block != 0);
    PyArrayObject *chained = output(blocks, NPY_UINT64);
    if (chained != NULL) {
        uint64_t words[SECRET / 8]; /* the secret that XXH3 derives from the seed */
        for (int i = 0; i < SECRET / 8; i++) words[i] = i % 2 ? secret_words[i] - seed : secret_words[i] + seed;
        const uint8_t *secret = (const uint8_t *)words;
        uint64_t *out = DATA(uint64_t, chained);
        for (npy_intp i = 0; i < blocks; i++) {
            uint64_t hash = i < whole ? xxh3((const uint8_t *)prompt.buf + i * block, block, secret) : rest;
            link = link * CHAIN_P + hash;
            out[i] = i < DENSE_BLOCKS ? link & ~WIDE : link | WIDE;
        }
    }
    PyBuffer_Release(&prompt);
    return (PyObject *)chained;
}
