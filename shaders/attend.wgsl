// What do query rows see in the pages? A workgroup takes one split of 256 tokens, one KV head and up to four query
// vectors (row × query head), and computes one mergeable state for each of them, in three steps:
//
// 1. scores: each thread multiplies two adjacent keys with the four queries;
// 2. softmax: the exact maximum of each query over the split, then the weights 2^(score - maximum);
// 3. values: threads own eight elements of the output each and every `groups`-th token, and fold in a fixed tree.
//
// The four queries are the lanes of vec4s throughout, so K and V are loaded once for all four and no lane's
// arithmetic depends on another's. Which thread does what depends on the token's place in its split alone. Tokens that
// a query does not see get weight zero by select; values that are not finite count as zero (a row that does not see
// them must not notice, and 0 × NaN would be NaN).

// Dtype::code of the pages.
override page_format: u32;

struct AttendParams {
    record: RecordParams,
    q: ViewParams,
    q_dtype: u32,
    q_heads: u32,
    group: u32,
    split_shift: u32,
    scale_log2: f32,
    tiles_at: u32,
    tiles: u32,
    rows_at: u32,
    items: u32,
    state_words: u32,
    query_tile: u32,
    first_item: u32,
}

struct Tile {
    table: u32,
    row: u32,
    rows: u32,
    split: u32,
    splits: u32,
    item: u32,
}

struct Row {
    start: u32,
    end: u32,
    state: u32,
    split: u32,
}

@group(0) @binding(0) var<uniform> params: AttendParams;
@group(1) @binding(0) var<storage, read> tables: array<u32>;
@group(1) @binding(1) var<storage, read> queries: array<u32>;
@group(1) @binding(2) var<storage, read_write> states: array<f32>;

const THREADS = 128u;
const SPLIT = 256u;
// The score of what is not seen.
const LOWEST = -3.0e38;

// Scores, then weights, of the split's tokens.
var<workgroup> scores: array<vec4<f32>, 256>;
// Queries at first; from MAXIMA on, 16 partial maxima; then the outputs that fold: nine vectors for each of 64 threads.
var<workgroup> stage: array<vec4<f32>, 576>;
const MAXIMA = 256u;
const FOLDING = 64u;

fn load_tile(number: u32) -> Tile {
    let at = params.tiles_at + 8u * number;
    return Tile(
        descriptors[at],
        descriptors[at + 1u],
        descriptors[at + 2u],
        descriptors[at + 3u],
        descriptors[at + 4u],
        descriptors[at + 5u],
    );
}

fn load_row(number: u32) -> Row {
    let at = params.rows_at + 4u * number;
    return Row(descriptors[at], descriptors[at + 1u], descriptors[at + 2u], descriptors[at + 3u]);
}

// The tile that holds a work item: the last one that starts no later.
fn find_tile(item: u32) -> Tile {
    var low = 0u;
    var high = params.tiles;
    while (high - low > 1u) {
        let middle = (low + high) >> 1u;
        if (load_tile(middle).item <= item) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return load_tile(low);
}

// The work item's query vectors, one a lane.
struct Lanes {
    // Tokens seen, counted from the split's first one; none where `to` is 0.
    from_token: vec4<u32>,
    to_token: vec4<u32>,
    // Element index of the query.
    query: vec4<u32>,
    // First word of the state.
    state: vec4<u32>,
}

fn load_lanes(tile: Tile, split: u32, kv_head: u32, first_vector: u32) -> Lanes {
    var lanes = Lanes(vec4(0u), vec4(0u), vec4(0u), vec4(0u));
    let first = split << params.split_shift;
    for (var lane = 0u; lane < 4u; lane++) {
        // A lane without a query repeats the tile's last one and writes nothing.
        let member = min(first_vector + lane, tile.rows * params.group - 1u);
        let number = tile.row + member / params.group;
        let head = kv_head * params.group + member % params.group;
        let row = load_row(number);
        let from_token = max(row.start, first) - first;
        let to_token = min(max(row.end, first) - first, SPLIT);
        let seen = member == first_vector + lane && from_token < to_token;
        lanes.from_token[lane] = select(0u, from_token, seen);
        lanes.to_token[lane] = select(0u, to_token, seen);
        lanes.query[lane] = element_at(params.q, number, head, 0u);
        lanes.state[lane] = ((row.state + split - row.split) * params.q_heads + head) * params.state_words;
    }
    return lanes;
}

fn sees(lanes: Lanes, token: u32) -> vec4<bool> {
    return (vec4(token) >= lanes.from_token) & (vec4(token) < lanes.to_token);
}

fn query_bits(index: u32) -> u32 {
    return bits_in(queries[word_of(index, params.q_dtype)], index, params.q_dtype);
}

// Element `element` of the four queries.
fn load_query(lanes: Lanes, element: u32) -> vec4<f32> {
    let index = lanes.query + vec4(element * params.q.element);
    let bits = vec4(query_bits(index.x), query_bits(index.y), query_bits(index.z), query_bits(index.w));
    return bitcast<vec4<f32>>(widen(bits, params.q_dtype));
}

// Eight consecutive elements of a page row.
struct Eight {
    a: vec4<f32>,
    b: vec4<f32>,
}

// Words of two elements each; `zeroing` replaces what is not finite by zero.
fn decode(words: vec2<u32>, zeroing: bool) -> vec4<f32> {
    if (page_format == F16) {
        var low = words & vec2(0xffffu);
        var high = words & vec2(0xffff0000u);
        if (zeroing) {
            low = select(low, vec2(0u), (low & vec2(0x7c00u)) == vec2(0x7c00u));
            high = select(high, vec2(0u), (high & vec2(0x7c000000u)) == vec2(0x7c000000u));
        }
        return vec4(unpack2x16float(low.x | high.x), unpack2x16float(low.y | high.y));
    }
    let low = words << vec2(16u);
    let high = words & vec2(0xffff0000u);
    return as_floats(vec4(low.x, high.x, low.y, high.y), zeroing);
}

fn as_floats(bits: vec4<u32>, zeroing: bool) -> vec4<f32> {
    let special = (bits & vec4(0x7f800000u)) == vec4(0x7f800000u);
    return bitcast<vec4<f32>>(select(bits, vec4(0u), special & vec4(zeroing)));
}

// Elements 8 × unit .. 8 × unit + 8 of the row that starts at `quad`.
fn load_eight(slab: u32, quad: u32, unit: u32, zeroing: bool) -> Eight {
    if (page_format == F32) {
        let low = load_quad(slab, quad + 2u * unit);
        let high = load_quad(slab, quad + 2u * unit + 1u);
        return Eight(as_floats(low, zeroing), as_floats(high, zeroing));
    }
    let words = load_quad(slab, quad + unit);
    return Eight(decode(words.xy, zeroing), decode(words.zw, zeroing));
}

// Eight elements of two keys times those of the four queries.
struct Dots {
    a: vec4<f32>,
    b: vec4<f32>,
}

fn add_product(sums: Dots, key_a: f32, key_b: f32, query: vec4<f32>) -> Dots {
    return Dots(fma(vec4(key_a), query, sums.a), fma(vec4(key_b), query, sums.b));
}

fn dot_eight(key_a: Eight, key_b: Eight, element: u32) -> Dots {
    var sums = Dots(vec4(0.0), vec4(0.0));
    sums = add_product(sums, key_a.a.x, key_b.a.x, stage[element]);
    sums = add_product(sums, key_a.a.y, key_b.a.y, stage[element + 1u]);
    sums = add_product(sums, key_a.a.z, key_b.a.z, stage[element + 2u]);
    sums = add_product(sums, key_a.a.w, key_b.a.w, stage[element + 3u]);
    sums = add_product(sums, key_a.b.x, key_b.b.x, stage[element + 4u]);
    sums = add_product(sums, key_a.b.y, key_b.b.y, stage[element + 5u]);
    sums = add_product(sums, key_a.b.z, key_b.b.z, stage[element + 6u]);
    return add_product(sums, key_a.b.w, key_b.b.w, stage[element + 7u]);
}

// The frame that holds a token of the tile's sequence.
fn token_place(tile: Tile, token: u32) -> Place {
    return frame_place(params.record, tables[tile.table + (token >> params.record.page_shift)]);
}

// Workgroups: x numbers the block of four query vectors, y and z the pair of work item and KV head.
@compute @workgroup_size(128)
fn attend(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let record = params.record;
    let number = workgroup.z * FOLD + workgroup.y;
    if (number >= params.items * record.kv_heads) {
        return;
    }
    let kv_head = number % record.kv_heads;
    let item = params.first_item + number / record.kv_heads;
    let tile = find_tile(item);
    let first_vector = workgroup.x * 4u;
    if (first_vector >= tile.rows * params.group) {
        return;
    }
    let split = tile.split + item - tile.item;
    let first = split << params.split_shift;
    let lanes = load_lanes(tile, split, kv_head, first_vector);
    // Tokens that any lane sees: what no lane sees is not read.
    let unseen = lanes.to_token == vec4(0u);
    let starts = select(lanes.from_token, vec4(SPLIT), unseen);
    let from_token = min(min(starts.x, starts.y), min(starts.z, starts.w));
    let to_token = max(max(lanes.to_token.x, lanes.to_token.y), max(lanes.to_token.z, lanes.to_token.w));
    if (from_token >= to_token) {
        return;
    }
    for (var element = thread; element < record.k_dim; element += THREADS) {
        stage[element] = load_query(lanes, element);
    }
    workgroupBarrier();

    // 1. Scores of tokens 2 × thread and 2 × thread + 1, which lie in one page.
    let token = 2u * thread;
    var score_a = vec4(LOWEST);
    var score_b = vec4(LOWEST);
    let seen_a = sees(lanes, token);
    let seen_b = sees(lanes, token + 1u);
    if (token + 2u > from_token && token < to_token) {
        let slot = (first + token) & ((1u << record.page_shift) - 1u);
        let place = token_place(tile, first + token);
        let key_a = place.quad + key_quad(record, kv_head, slot);
        let key_b = key_a + (record.k_row_words >> 2u);
        var sum_a = vec4(0.0);
        var sum_b = vec4(0.0);
        let units = record.k_dim >> 3u;
        for (var unit = 0u; unit < units; unit++) {
            let eight_a = load_eight(place.slab, key_a, unit, false);
            let eight_b = load_eight(place.slab, key_b, unit, false);
            let dots = dot_eight(eight_a, eight_b, 8u * unit);
            sum_a += dots.a;
            sum_b += dots.b;
        }
        score_a = select(score_a, sum_a * params.scale_log2, seen_a);
        score_b = select(score_b, sum_b * params.scale_log2, seen_b);
    }
    scores[token] = score_a;
    scores[token + 1u] = score_b;
    workgroupBarrier();

    // 2. The maximum: 16 threads take 16 tokens each, then every thread takes their results.
    if (thread < 16u) {
        var best = vec4(LOWEST);
        for (var i = thread; i < SPLIT; i += 16u) {
            best = max(best, scores[i]);
        }
        stage[MAXIMA + thread] = best;
    }
    workgroupBarrier();
    var top = vec4(LOWEST);
    for (var i = 0u; i < 16u; i++) {
        top = max(top, stage[MAXIMA + i]);
    }
    scores[token] = select(vec4(0.0), weights(score_a - top), seen_a);
    scores[token + 1u] = select(vec4(0.0), weights(score_b - top), seen_b);
    workgroupBarrier();

    // 3. Threads are `groups` rows of `units`; group g takes tokens g, g + groups, ... of the split.
    let units = record.v_dim >> 3u;
    let groups = 1u << firstLeadingBit(THREADS / units);
    let group = thread / units;
    let unit = thread % units;
    var o0 = vec4(0.0);
    var o1 = vec4(0.0);
    var o2 = vec4(0.0);
    var o3 = vec4(0.0);
    var o4 = vec4(0.0);
    var o5 = vec4(0.0);
    var o6 = vec4(0.0);
    var o7 = vec4(0.0);
    var sum = vec4(0.0);
    if (group < groups) {
        let start = from_token + ((group - from_token) & (groups - 1u));
        for (var i = start; i < to_token; i += groups) {
            let slot = (first + i) & ((1u << record.page_shift) - 1u);
            let place = token_place(tile, first + i);
            let value = load_eight(place.slab, place.quad + value_quad(record, kv_head, slot), unit, true);
            let p = scores[i];
            o0 = fma(p, vec4(value.a.x), o0);
            o1 = fma(p, vec4(value.a.y), o1);
            o2 = fma(p, vec4(value.a.z), o2);
            o3 = fma(p, vec4(value.a.w), o3);
            o4 = fma(p, vec4(value.b.x), o4);
            o5 = fma(p, vec4(value.b.y), o5);
            o6 = fma(p, vec4(value.b.z), o6);
            o7 = fma(p, vec4(value.b.w), o7);
            sum += p;
        }
    }
    // The upper half of the groups hands over to the lower half until one is left. A group's slot is written by the
    // only thread that read it last, so one barrier a round is enough.
    for (var width = groups >> 1u; width > 0u; width >>= 1u) {
        let wrap = (groups >> 1u) - 1u;
        if (group >= width && group < 2u * width) {
            let at = (group & wrap) * units + unit;
            stage[at] = o0;
            stage[at + FOLDING] = o1;
            stage[at + 2u * FOLDING] = o2;
            stage[at + 3u * FOLDING] = o3;
            stage[at + 4u * FOLDING] = o4;
            stage[at + 5u * FOLDING] = o5;
            stage[at + 6u * FOLDING] = o6;
            stage[at + 7u * FOLDING] = o7;
            stage[at + 8u * FOLDING] = sum;
        }
        workgroupBarrier();
        if (group < width) {
            let at = ((group + width) & wrap) * units + unit;
            o0 += stage[at];
            o1 += stage[at + FOLDING];
            o2 += stage[at + 2u * FOLDING];
            o3 += stage[at + 3u * FOLDING];
            o4 += stage[at + 4u * FOLDING];
            o5 += stage[at + 5u * FOLDING];
            o6 += stage[at + 6u * FOLDING];
            o7 += stage[at + 7u * FOLDING];
            sum += stage[at + 8u * FOLDING];
        }
    }
    if (group > 0u) {
        return;
    }
    for (var lane = 0u; lane < 4u; lane++) {
        if (lanes.to_token[lane] == 0u) {
            continue;
        }
        let at = lanes.state[lane];
        let element = at + 8u * unit;
        states[element] = o0[lane];
        states[element + 1u] = o1[lane];
        states[element + 2u] = o2[lane];
        states[element + 3u] = o3[lane];
        states[element + 4u] = o4[lane];
        states[element + 5u] = o5[lane];
        states[element + 6u] = o6[lane];
        states[element + 7u] = o7[lane];
        if (unit == 0u) {
            let tail = at + record.v_dim;
            states[tail] = top[lane];
            states[tail + 1u] = sum[lane];
            states[tail + 2u] = 0.0;
            states[tail + 3u] = 0.0;
        }
    }
}
