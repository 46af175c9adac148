/* Looks up and inserts blocks in the prefix index (`shm.prefix_index` has the layout and the terms). */
#include "index.h"

#define OWNER_LIVE 1
#define OWNER_RETIRED 2
#define NONE (-1)
#define PREFETCHED 4 /* how many hashes ahead an insert asks for buckets */
#define FRESH 0 /* what `insert_block` returns */
#define STALE 1
#define NEW 2
#define PROBE_STRIDE 32
#define DENSE_BLOCKS 64
#define UNNAMED 0 /* no owner has this id */

/* The result of one match. The arrays are static because they are large. Python's lock guards them, because no kernel releases it. */
static uint32_t deepest[OWNERS]; /* owner -> place of its deepest block in the chain + 1; all 0 between two matches */
static uint16_t owners_found[OWNERS];
static int owners_count;

static inline void hit(uint64_t owner, uint32_t depth) {
    if (deepest[owner] == 0) owners_found[owners_count++] = (uint16_t)owner;
    if (depth > deepest[owner]) deepest[owner] = depth;
}

/* Records the owners of one block. `depth`: its place in the chain + 1. */
static inline void look_up(const uint64_t *entries, uint64_t buckets, uint64_t hash, uint32_t depth) {
    const uint64_t *near[2] = {entries + WAYS * scaled(hash & 0xFFFFFFFF, buckets), entries + WAYS * scaled(hash >> 32, buckets)};
    int far = 0;
    for (int way = 0; way < NEAR_WAYS; way++) {
        uint64_t entry = load(near[way >> 3] + (way & 7));
        if ((entry ^ hash) >= SAME_TAG) continue;
        far |= OWNER(entry) == FAR_MARK;
        hit(OWNER(entry), depth);
    }
    if (!far) return;
    const uint64_t *first = entries + WAYS * scaled(hash >> 16 & 0xFFFFFFFF, buckets - FAR_BUCKETS + 1);
    for (int at = 0; at < FAR_BUCKETS * WAYS; at++) {
        uint64_t entry = load(first + at);
        if ((entry ^ hash) < SAME_TAG) hit(OWNER(entry), depth);
    }
}

/* Asks the CPU for the near buckets of a hash, which are rarely in its cache. */
static inline void prefetch_near(const uint64_t *entries, uint64_t buckets, uint64_t hash) {
    __builtin_prefetch(entries + WAYS * scaled(hash & 0xFFFFFFFF, buckets));
    __builtin_prefetch(entries + WAYS * scaled(hash >> 32, buckets));
}

/* Looks up every block of a short chain. In a long chain, looks up every 32nd block and the last one, and then all blocks between an
   owner's deepest hit and the next probe. Returns 0, or -1 with an exception. */
static int match_chain(const uint64_t *entries, uint64_t buckets, const uint64_t *hashes, npy_intp count) {
    if (count <= DENSE_BLOCKS) {
        for (npy_intp i = 0; i < count; i++) prefetch_near(entries, buckets, hashes[i]);
        for (npy_intp i = 0; i < count; i++) look_up(entries, buckets, hashes[i], (uint32_t)i + 1);
        return 0;
    }
    npy_intp last = count - 1, gaps = last / PROBE_STRIDE + 1;
    uint8_t *open = PyMem_Calloc(gaps, 1); /* gap -> whether it begins with the deepest hit of an owner */
    if (open == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (npy_intp i = 0; i < last; i += PROBE_STRIDE) look_up(entries, buckets, hashes[i], (uint32_t)i + 1);
    look_up(entries, buckets, hashes[last], (uint32_t)count);
    for (int i = 0; i < owners_count; i++)
        if (deepest[owners_found[i]] < count) open[(deepest[owners_found[i]] - 1) / PROBE_STRIDE] = 1;
    for (npy_intp gap = 0; gap < gaps; gap++) {
        if (!open[gap]) continue;
        npy_intp begin = gap * PROBE_STRIDE, end = begin + PROBE_STRIDE < last ? begin + PROBE_STRIDE : last;
        for (npy_intp i = begin + 1; i < end; i++) look_up(entries, buckets, hashes[i], (uint32_t)i + 1);
    }
    PyMem_Free(open);
    return 0;
}

/* match(entries, hashes): returns a dict: owner -> place of its deepest block in the chain + 1. `entries`: uint64, shape (buckets, 8). */
KERNEL(match) {
    if (!arguments("match", count, 2)) return NULL;
    PyArrayObject *table = in_place(args[0], NPY_UINT64, 2, 0, "match");
    if (table == NULL) return NULL;
    if (PyArray_DIM(table, 1) != WAYS || PyArray_DIM(table, 0) < FAR_BUCKETS)
        return PyErr_Format(PyExc_ValueError, "match: a table has at least %d buckets of %d entries", FAR_BUCKETS, WAYS);
    PyArrayObject *hashes = input(args[1], NPY_UINT64);
    if (hashes == NULL) return NULL;
    int failed = match_chain(DATA(uint64_t, table), PyArray_DIM(table, 0), DATA(uint64_t, hashes), PyArray_SIZE(hashes));
    Py_DECREF(hashes);
    PyObject *found = failed ? NULL : PyDict_New();
    for (int i = 0; i < owners_count; i++) {
        uint16_t owner = owners_found[i];
        if (found != NULL && owner != 0 && owner != FAR_MARK) { /* 0: a tag of only zeros equals an empty entry */
            PyObject *key = PyLong_FromLong(owner), *depth = PyLong_FromUnsignedLong(deepest[owner]);
            if (key == NULL || depth == NULL || PyDict_SetItem(found, key, depth) < 0) Py_CLEAR(found);
            Py_XDECREF(key);
            Py_XDECREF(depth);
        }
        deepest[owner] = 0;
    }
    owners_count = 0;
    return found;
}

typedef struct {
    uint64_t *entries, buckets;
    uint32_t *ages, age;
    const uint8_t *states;
    int64_t *held;
    const int64_t *limits; /* owner -> number of blocks above which it loses its oldest entries; 0: not known */
    int near_owners, spills;
    int retired;                              /* whether there are retired owners; their entries count as empty */
    int named;                                /* whether owners came by name; blocks of unknown names are left out */
    uint32_t stale;                           /* after how many ticks a refreshed entry is news, as a new one is */
    Py_ssize_t added, evicted, gone, dropped; /* what `insert` returns */
    int over;                                 /* the same: whether an owner of a new entry exceeds its limit */
} Index;

static inline int is_empty(const Index *index, uint64_t entry) {
    return entry == 0 || (index->retired && index->states[OWNER(entry)] == OWNER_RETIRED);
}

static inline void store(Index *index, uint64_t place, uint64_t entry) {
    uint64_t before = index->entries[place];
    __atomic_store_n(index->entries + place, entry, __ATOMIC_RELAXED);
    index->ages[place] = index->age;
    index->held[OWNER(entry)] += BLOCKS(entry);
    index->over |= index->limits[OWNER(entry)] && index->held[OWNER(entry)] > index->limits[OWNER(entry)];
    if (before == 0) {
        index->added++;
        return;
    }
    index->held[OWNER(before)] -= BLOCKS(before);
    if (is_empty(index, before)) index->gone++;
    else index->evicted++;
}

static inline uint64_t first_far(const Index *index, uint64_t hash) {
    return scaled(hash >> 16 & 0xFFFFFFFF, index->buckets - FAR_BUCKETS + 1);
}

/* Searches the entry's far bucket for a value: the entry itself, or 0 to find an empty place. Returns the place, or NONE. */
static int64_t in_far(const Index *index, uint64_t entry, uint64_t value) {
    uint64_t place = WAYS * (first_far(index, entry) + FAR_BUCKET(OWNER(entry)));
    for (int way = 0; way < WAYS; way++)
        if (index->entries[place + way] == value) return place + way;
    return NONE;
}

/* Returns 1 if an entry may move from this place to its far bucket. */
static int movable(const Index *index, uint64_t place) {
    uint64_t entry = index->entries[place];
    if (OWNER(entry) == FAR_MARK || place / WAYS == first_far(index, entry) + FAR_BUCKET(OWNER(entry))) return 0;
    return in_far(index, entry, 0) != NONE;
}

/* Moves entries of one hash from two full buckets to its far buckets, and leaves a far mark. Chooses the hash that frees most places (of
   several such hashes, the first). Returns an empty place, or NONE. A reader sees a moved entry at its old place, at its new place, or at
   both. */
static int64_t spill(Index *index, const uint64_t *first) {
    uint64_t places[NEAR_WAYS], moved[NEAR_WAYS];
    int best = 0, chosen = NONE, marked = 0, count = 0;
    for (int i = 0; i < NEAR_WAYS; i++) places[i] = first[i >> 3] + (i & 7);
    int ways = first[0] == first[1] ? WAYS : NEAR_WAYS;
    for (int i = 0; i < ways; i++) {
        int gain = -1, mark = 0;
        for (int j = 0; j < ways; j++) {
            if ((index->entries[places[j]] ^ index->entries[places[i]]) >= SAME_TAG) continue;
            if (OWNER(index->entries[places[j]]) == FAR_MARK) mark = 1;
            gain += movable(index, places[j]);
        }
        if (gain + mark > best) {
            best = gain + mark;
            chosen = i;
            marked = mark;
        }
    }
    if (chosen == NONE) return NONE;
    uint64_t tag = index->entries[places[chosen]] & ~(SAME_TAG - 1);
    for (int i = 0; i < ways; i++) {
        if ((index->entries[places[i]] ^ tag) >= SAME_TAG || !movable(index, places[i])) continue;
        int64_t to = in_far(index, index->entries[places[i]], 0);
        index->ages[to] = index->ages[places[i]];
        __atomic_store_n(index->entries + to, index->entries[places[i]], __ATOMIC_RELAXED);
        moved[count++] = places[i];
    }
    if (!marked) {
        __atomic_store_n(index->entries + moved[0], tag | FAR_MARK, __ATOMIC_RELEASE);
        index->ages[moved[0]] = index->age;
        index->held[FAR_MARK] += BLOCKS(tag);
        index->added++;
    }
    for (int i = !marked; i < count; i++) __atomic_store_n(index->entries + moved[i], 0, __ATOMIC_RELEASE);
    return count > !marked ? (int64_t)moved[!marked] : NONE;
}

/* Refreshes the entry at a place. Returns STALE if its age was `stale` or more ticks ago, else FRESH. */
static inline int refresh(Index *index, uint64_t place) {
    int stale = (uint32_t)(index->age - index->ages[place]) >= index->stale;
    index->ages[place] = index->age;
    return stale ? STALE : FRESH;
}

/* Returns the place of the oldest entry of a bucket, or `oldest` if none is older. */
static uint64_t older(const Index *index, uint64_t bucket, uint64_t oldest) {
    uint32_t newest = index->age + 1; /* makes the current age the largest, even after the counter has wrapped */
    for (uint64_t place = bucket; place < bucket + WAYS; place++)
        if (index->ages[place] - newest < index->ages[oldest] - newest) oldest = place;
    return oldest;
}

/* Returns an empty way of the emptier near bucket. If both are full, makes room (`spill`) or returns the place of the oldest entry. */
static uint64_t near_place(Index *index, const uint64_t *first) {
    int room[2] = {0, 0};
    uint64_t empty[2] = {0, 0};
    for (int way = 0; way < NEAR_WAYS; way++) {
        uint64_t place = first[way >> 3] + (way & 7);
        if (is_empty(index, index->entries[place]) && room[way >> 3]++ == 0) empty[way >> 3] = place;
    }
    if (room[0] || room[1]) return empty[room[1] > room[0]];
    int64_t place = index->spills ? spill(index, first) : NONE;
    return place != NONE ? (uint64_t)place : older(index, first[1], older(index, first[0], first[0]));
}

/* Returns an empty way of the entry's far bucket, or the place of the oldest entry there. */
static uint64_t far_place(const Index *index, uint64_t entry) {
    uint64_t bucket = WAYS * (first_far(index, entry) + FAR_BUCKET(OWNER(entry)));
    for (uint64_t place = bucket; place < bucket + WAYS; place++)
        if (is_empty(index, index->entries[place])) return place;
    return older(index, bucket, bucket);
}

/* Refreshes an entry. If it is new, writes it to a near bucket; or to its far bucket, with a far mark, if `near_owners` owners have this hash
   in the near ones. Returns what the entry was: NEW, STALE or FRESH. */
static int insert_block(Index *index, uint64_t hash, uint64_t entry) {
    const uint64_t first[2] = {WAYS * scaled(hash & 0xFFFFFFFF, index->buckets), WAYS * scaled(hash >> 32, index->buckets)};
    int tagged = 0;
    int64_t mark = NONE, far = NONE;
    for (int way = 0; way < NEAR_WAYS; way++) {
        uint64_t place = first[way >> 3] + (way & 7);
        if (index->entries[place] == entry) return refresh(index, place);
    }
    for (int way = 0; way < NEAR_WAYS; way++) {
        uint64_t place = first[way >> 3] + (way & 7);
        if ((index->entries[place] ^ entry) >= SAME_TAG) continue;
        tagged++;
        if (OWNER(index->entries[place]) == FAR_MARK) mark = place;
    }
    int crowded = tagged >= index->near_owners, was = NEW;
    if (mark != NONE || crowded) far = in_far(index, entry, entry);
    if (far == NONE && !crowded) {
        store(index, near_place(index, first), entry);
        return NEW;
    }
    if (far != NONE) was = refresh(index, far);
    else store(index, far_place(index, entry), entry);
    if (mark != NONE) index->ages[mark] = index->age;
    else store(index, near_place(index, first), (entry & ~(SAME_TAG - 1)) | FAR_MARK);
    return was;
}

/* Asks the CPU for the near buckets of a hash and for their ages. */
static inline void prefetch(const Index *index, uint64_t hash) {
    prefetch_near(index->entries, index->buckets, hash);
    __builtin_prefetch(index->ages + WAYS * scaled(hash & 0xFFFFFFFF, index->buckets), 1);
    __builtin_prefetch(index->ages + WAYS * scaled(hash >> 32, index->buckets), 1);
}

/* The news of one insert. */
typedef struct {
    npy_intp news_count;
    uint64_t *news;
    uint16_t *news_owners;
} Outcome;

/* Inserts all hashes, one after the other. */
static void insert_all(Index *index, const uint64_t *hashes, npy_intp count, const uint16_t *owners, npy_intp step, Outcome *out) {
    for (npy_intp i = 0; i < count; i++) {
        if (i + PREFETCHED < count) prefetch(index, hashes[i + PREFETCHED]);
        uint16_t owner = owners[i * step];
        if (owner == UNNAMED && index->named) continue;
        if (index->states[owner] != OWNER_LIVE) {
            index->dropped++;
            continue;
        }
        int was = insert_block(index, hashes[i], (hashes[i] & ~(SAME_TAG - 1)) | owner);
        if (was == FRESH || out->news == NULL) continue;
        out->news[out->news_count] = hashes[i];
        out->news_owners[out->news_count++] = owner;
    }
}

/* Returns the news of an insert: the owner of each run of hashes, the number of hashes of each, and the bytes of all hashes. */
static PyObject *news_of(const Outcome *out) {
    PyObject *owners = PyList_New(0), *counts = PyList_New(0), *hashes = PyBytes_FromStringAndSize((char *)out->news, out->news_count * 8);
    int valid = owners != NULL && counts != NULL && hashes != NULL;
    for (npy_intp at = 0, end; valid && at < out->news_count; at = end) {
        for (end = at + 1; end < out->news_count && out->news_owners[end] == out->news_owners[at]; end++) {}
        PyObject *owner = PyLong_FromLong(out->news_owners[at]), *size = PyLong_FromSsize_t(end - at);
        valid = owner != NULL && size != NULL && !PyList_Append(owners, owner) && !PyList_Append(counts, size);
        Py_XDECREF(owner);
        Py_XDECREF(size);
    }
    if (valid) return Py_BuildValue("NNN", owners, counts, hashes);
    Py_XDECREF(owners);
    Py_XDECREF(counts);
    Py_XDECREF(hashes);
    return NULL;
}

/* The owners of some hashes: `ids[i * step]` is the owner of hash i. `array`: NULL, or a reference that the caller gives back. */
typedef struct {
    const uint16_t *ids;
    npy_intp step;
    uint16_t one;
    PyArrayObject *array;
} Owners;

/* Returns the owner of a name (u64), UNNAMED if there is none, or -1 with an exception. */
static long owner_of(PyObject *owners, const char *name) {
    uint64_t number;
    memcpy(&number, name, sizeof(number));
    PyObject *key = PyLong_FromUnsignedLongLong(number), *owner = key == NULL ? NULL : PyDict_GetItemWithError(owners, key);
    Py_XDECREF(key);
    if (owner == NULL) return PyErr_Occurred() ? -1 : UNNAMED;
    long id = PyLong_AsLong(owner);
    if (!PyErr_Occurred() && (id < 0 || id >= OWNERS)) PyErr_SetString(PyExc_ValueError, "insert: there is no such owner");
    return PyErr_Occurred() ? -1 : id;
}

/* Returns the owner of each hash, from the names (u64) and lengths (u16) of runs; or NULL with an exception. */
static PyArrayObject *expanded(PyObject *runs, npy_intp hashes, const char *name) {
    PyObject *owners, *names, *counts;
    if (!PyArg_ParseTuple(runs, "O!SS", &PyDict_Type, &owners, &names, &counts)) return NULL;
    PyArrayObject *array = output(hashes, NPY_UINT16);
    if (array == NULL) return NULL;
    npy_intp at = 0, given = PyBytes_GET_SIZE(counts) / 2, fits = PyBytes_GET_SIZE(names) == 8 * given;
    for (npy_intp run = 0; fits && run < given; run++) {
        uint16_t size;
        memcpy(&size, PyBytes_AS_STRING(counts) + 2 * run, 2);
        long owner = owner_of(owners, PyBytes_AS_STRING(names) + 8 * run);
        fits = owner >= 0 && size <= hashes - at;
        for (; fits && size > 0; size--) DATA(uint16_t, array)[at++] = (uint16_t)owner;
    }
    if (fits && at == hashes) return array;
    Py_DECREF(array);
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%s: hashes and owners differ in length", name);
    return NULL;
}

/* Reads one owner for all hashes, one per hash, or runs. Returns 1, or 0 with an exception. */
static int owners_for(PyObject *object, npy_intp hashes, Owners *owners, const char *name) {
    owners->array = NULL;
    if (PyTuple_Check(object)) {
        owners->array = expanded(object, hashes, name);
        if (owners->array == NULL) return 0;
        owners->ids = DATA(uint16_t, owners->array);
        owners->step = 1;
        return 1;
    }
    if (PyLong_Check(object)) {
        owners->one = (uint16_t)PyLong_AsUnsignedLongMask(object);
        owners->ids = &owners->one;
        owners->step = 0;
        return !PyErr_Occurred();
    }
    owners->array = (PyArrayObject *)PyArray_FROM_OTF(object, NPY_UINT16, NPY_ARRAY_IN_ARRAY | NPY_ARRAY_FORCECAST);
    if (owners->array == NULL) return 0;
    if (PyArray_SIZE(owners->array) != hashes) {
        PyErr_Format(PyExc_ValueError, "%s: hashes and owners differ in length", name);
        Py_DECREF(owners->array);
        return 0;
    }
    owners->ids = DATA(uint16_t, owners->array);
    owners->step = 1;
    return 1;
}

/* The hashes of one call. `array`: NULL, or a reference that the caller gives back. */
typedef struct {
    const uint64_t *values;
    npy_intp count;
    PyArrayObject *array;
} Given;

/* Reads hashes from an array or from bytes. Returns 1, or 0 with an exception. */
static int hashes_for(PyObject *object, Given *hashes) {
    hashes->array = NULL;
    if (PyBytes_Check(object)) { /* their content is aligned to 8 bytes */
        hashes->values = (const uint64_t *)PyBytes_AS_STRING(object);
        hashes->count = PyBytes_GET_SIZE(object) / 8;
        return 1;
    }
    hashes->array = input(object, NPY_UINT64);
    if (hashes->array == NULL) return 0;
    hashes->values = DATA(uint64_t, hashes->array);
    hashes->count = PyArray_SIZE(hashes->array);
    return 1;
}

/* insert(entries, ages, states, held, limits, hashes, owners, age, near_owners, spills, retired, stale): records that owners hold these
   blocks. `limits`: int64, as `held`. `hashes`: an array or bytes. `owners`: one for all hashes, one per hash, or for runs of hashes a dict:
   name -> owner, the name (u64) of each run, and its length (u16); runs of other names are left out. `spills`: whether full buckets give
   entries to far buckets. `retired`: whether there are retired owners. `stale`: None, or after how many ticks a refreshed entry is news, as a
   new one is. Returns six values: how many entries were added, how many live entries were evicted, how many entries of retired owners
   were replaced, how many blocks were dropped because their owner is not live, whether the owner of a new entry has more blocks than its
   limit, and the news (`news_of`), or None. */
KERNEL(insert) {
    if (!arguments("insert", count, 12)) return NULL;
    PyArrayObject *table = in_place(args[0], NPY_UINT64, 2, 1, "insert: entries"),
                  *ages = in_place(args[1], NPY_UINT32, 2, 1, "insert: ages"),
                  *states = in_place(args[2], NPY_UINT8, 1, 0, "insert: states"),
                  *held = in_place(args[3], NPY_INT64, 1, 1, "insert: held"),
                  *limits = in_place(args[4], NPY_INT64, 1, 0, "insert: limits");
    if (table == NULL || ages == NULL || states == NULL || held == NULL || limits == NULL) return NULL;
    if (PyArray_DIM(table, 1) != WAYS || PyArray_DIM(table, 0) < FAR_BUCKETS || PyArray_SIZE(ages) != PyArray_SIZE(table) ||
        PyArray_SIZE(states) != OWNERS || PyArray_SIZE(held) != OWNERS || PyArray_SIZE(limits) != OWNERS)
        return PyErr_Format(PyExc_ValueError, "insert: the arrays are not those of one index");
    int tells = args[11] != Py_None;
    Index index = {.entries = DATA(uint64_t, table), .buckets = PyArray_DIM(table, 0), .ages = DATA(uint32_t, ages),
                   .age = (uint32_t)PyLong_AsUnsignedLongLongMask(args[7]), .states = DATA(uint8_t, states),
                   .held = DATA(int64_t, held), .limits = DATA(int64_t, limits), .near_owners = (int)PyLong_AsLong(args[8]),
                   .spills = PyObject_IsTrue(args[9]), .retired = PyObject_IsTrue(args[10]), .named = PyTuple_Check(args[6]),
                   .stale = tells ? (uint32_t)PyLong_AsUnsignedLongMask(args[11]) : UINT32_MAX};
    Owners owners;
    Given hashes;
    PyObject *result = NULL;
    if (PyErr_Occurred() || !hashes_for(args[5], &hashes)) return NULL;
    if (owners_for(args[6], hashes.count, &owners, "insert")) {
        npy_intp size = hashes.count + 1; /* so that no size is 0 */
        Outcome out = {.news = tells ? PyMem_New(uint64_t, size) : NULL, .news_owners = tells ? PyMem_New(uint16_t, size) : NULL};
        if (tells && (out.news == NULL || out.news_owners == NULL)) PyErr_NoMemory();
        else {
            insert_all(&index, hashes.values, hashes.count, owners.ids, owners.step, &out);
            PyObject *news = tells ? news_of(&out) : Py_NewRef(Py_None);
            if (news != NULL)
                result = Py_BuildValue("nnnnNN", index.added, index.evicted, index.gone, index.dropped, PyBool_FromLong(index.over), news);
        }
        PyMem_Free(out.news);
        PyMem_Free(out.news_owners);
        Py_XDECREF(owners.array);
    }
    Py_XDECREF(hashes.array);
    return result;
}

/* Empties the places of a bucket that have this entry. Returns how many there were. `aged`: leave out those inserted or refreshed after
   the age `before`. */
static Py_ssize_t forget_in(Index *index, uint64_t bucket, uint64_t entry, int aged, uint32_t before) {
    Py_ssize_t freed = 0;
    for (uint64_t place = bucket * WAYS; place < (bucket + 1) * WAYS; place++) {
        if (index->entries[place] != entry || (aged && (int32_t)(index->ages[place] - before) > 0)) continue;
        __atomic_store_n(index->entries + place, 0, __ATOMIC_RELAXED);
        index->held[OWNER(entry)] -= BLOCKS(entry);
        freed++;
    }
    return freed;
}

/* Returns 1 if a hash has entries in its far buckets. */
static int any_far(const Index *index, uint64_t hash) {
    const uint64_t *first = index->entries + WAYS * first_far(index, hash);
    for (int at = 0; at < FAR_BUCKETS * WAYS; at++)
        if ((first[at] ^ hash) < SAME_TAG && OWNER(first[at]) != FAR_MARK) return 1;
    return 0;
}

/* forget(entries, ages, held, hashes, owners, before): removes the entries that say that owners hold these blocks, and the far marks of
   those hashes that have no far entries any more. `owners`: one for all hashes, or one per hash. `before`: None, or an age; entries that
   were inserted or refreshed after it stay. Returns the number of removed entries. */
KERNEL(forget) {
    if (!arguments("forget", count, 6)) return NULL;
    PyArrayObject *table = in_place(args[0], NPY_UINT64, 2, 1, "forget: entries"),
                  *ages = in_place(args[1], NPY_UINT32, 2, 0, "forget: ages"),
                  *held = in_place(args[2], NPY_INT64, 1, 1, "forget: held");
    if (table == NULL || ages == NULL || held == NULL) return NULL;
    if (PyArray_DIM(table, 1) != WAYS || PyArray_DIM(table, 0) < FAR_BUCKETS || PyArray_SIZE(ages) != PyArray_SIZE(table) ||
        PyArray_SIZE(held) != OWNERS)
        return PyErr_Format(PyExc_ValueError, "forget: the arrays are not those of one index");
    Index index = {.entries = DATA(uint64_t, table), .buckets = PyArray_DIM(table, 0), .ages = DATA(uint32_t, ages),
                   .held = DATA(int64_t, held)};
    int aged = args[5] != Py_None;
    uint32_t before = aged ? (uint32_t)PyLong_AsUnsignedLongLongMask(args[5]) : 0;
    Owners owners;
    PyArrayObject *hashes = PyErr_Occurred() ? NULL : input(args[3], NPY_UINT64);
    if (hashes == NULL) return NULL;
    int valid = owners_for(args[4], PyArray_SIZE(hashes), &owners, "forget");
    Py_ssize_t freed = 0;
    for (npy_intp i = 0; valid && i < PyArray_SIZE(hashes); i++) {
        uint64_t hash = DATA(uint64_t, hashes)[i], owner = owners.ids[i * owners.step];
        uint64_t entry = (hash & ~(SAME_TAG - 1)) | owner;
        uint64_t one = scaled(hash & 0xFFFFFFFF, index.buckets), two = scaled(hash >> 32, index.buckets);
        Py_ssize_t far = forget_in(&index, first_far(&index, hash) + FAR_BUCKET(owner), entry, aged, before);
        freed += far + forget_in(&index, one, entry, aged, before) + forget_in(&index, two, entry, aged, before);
        if (far && !any_far(&index, hash)) {
            uint64_t mark = (hash & ~(SAME_TAG - 1)) | FAR_MARK;
            freed += forget_in(&index, one, mark, 0, 0) + forget_in(&index, two, mark, 0, 0);
        }
    }
    Py_DECREF(hashes);
    if (!valid) return NULL;
    Py_XDECREF(owners.array);
    return PyLong_FromSsize_t(freed);
}
