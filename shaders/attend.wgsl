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
// them must not notice, and 0 × NaN would be NaN). How rows are read is up to attend_native.wgsl and attend_int8.wgsl.

const THREADS = 128u;
// The score of what is not seen.
const LOWEST = -3.0e38;

// Scores, then weights, of the split's tokens.
var<workgroup> scores: array<vec4<f32>, 256>;
// Queries at first; from MAXIMA on, 16 partial maxima; then the outputs that fold: nine vectors for each of 64 threads.
// The ends of both are also attend_int8.wgsl's.
var<workgroup> stage: array<vec4<f32>, 576>;
const MAXIMA = 256u;
const FOLDING = 64u;

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
        stage_query(lanes, kv_head, element);
    }
    workgroupBarrier();

    // 1. Scores of tokens 2 × thread and 2 × thread + 1, which lie in one page.
    let token = 2u * thread;
    var score_a = vec4(LOWEST);
    var score_b = vec4(LOWEST);
    var value_scales = vec2(1.0);
    let seen_a = sees(lanes, token);
    let seen_b = sees(lanes, token + 1u);
    if (token + 2u > from_token && token < to_token) {
        let slot = (first + token) & ((1u << record.page_shift) - 1u);
        let place = token_place(tile, first + token);
        let dots = key_products(place, kv_head, slot);
        score_a = select(score_a, dots.a * params.scale_log2, seen_a);
        score_b = select(score_b, dots.b * params.scale_log2, seen_b);
        value_scales = load_value_scales(place, kv_head, slot);
    }
    scores[token] = score_a;
    scores[token + 1u] = score_b;
    stage_constant(thread);
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
    let p_a = select(vec4(0.0), weights(score_a - top), seen_a);
    let p_b = select(vec4(0.0), weights(score_b - top), seen_b);
    scores[token] = p_a;
    scores[token + 1u] = p_b;
    stage_weights(token, p_a, p_b, value_scales);
    var constant = vec4(0.0);
    if (thread == 0u) {
        constant = sum_constant();
    }
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
            let value = load_value(place, kv_head, slot, unit);
            let w = value_weight(i);
            o0 = fma(w, vec4(value.a.x), o0);
            o1 = fma(w, vec4(value.a.y), o1);
            o2 = fma(w, vec4(value.a.z), o2);
            o3 = fma(w, vec4(value.a.w), o3);
            o4 = fma(w, vec4(value.b.x), o4);
            o5 = fma(w, vec4(value.b.y), o5);
            o6 = fma(w, vec4(value.b.z), o6);
            o7 = fma(w, vec4(value.b.w), o7);
            sum += scores[i];
        }
    }
    if (WEIGHTS_ARE_STAGED) {
        workgroupBarrier();
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
            states[tail + 2u] = constant[lane];
            states[tail + 3u] = 0.0;
        }
    }
}
