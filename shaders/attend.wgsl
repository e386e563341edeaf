// What do query rows see in the pages? A workgroup takes one split of 256 tokens, or a section of such, one KV head and four
// query vectors (row × query head), and computes one mergeable state for each of them, a split at a time, in four steps:
//
// 1. scores: the lanes of a row have eight elements of it each, and of the queries, and add up their products;
// 2. softmax: the exact maximum of each query over the split, then the weights 2^(score - maximum);
// 3. values: the lanes of a row have eight elements each, and sum them over every so many tokens;
// 4. total: the sums fold in a fixed tree, and come to the state of the splits before.
//
// Four queries are the lanes of vec4s throughout, so K and V are loaded once for all of them and no query's arithmetic
// depends on another's. Which thread does what depends on the token's place in its split alone. Tokens that a query does not
// see get weight zero by select; where others see them, values that are not finite count as zero (a row that does not see
// them must not notice, and 0 × NaN would be NaN). How rows are read is up to attend_native.wgsl and attend_int8.wgsl, how
// lanes add up to lanes_subgroup.wgsl and lanes_workgroup.wgsl.

const THREADS = 128u;
// The score of what is not seen.
const LOWEST = -3.0e38;

// What the kernel is compiled for, or 0 where the parameters say it: elements of a key and of a value, and the threads that
// share a row of either, a power of two from 4 to 32.
override only_dim: u32;
override only_lanes: u32;
// Rows that a lane loads at once, four or eight.
override lane_rows: u32;

fn k_dim() -> u32 {
    return select(params.record.k_dim, only_dim, only_dim > 0u);
}

fn v_dim() -> u32 {
    return select(params.record.v_dim, only_dim, only_dim > 0u);
}

// The fewest threads that can share a row.
fn lanes_of(dim: u32) -> u32 {
    return max(1u << (32u - countLeadingZeros((dim >> 3u) - 1u)), 4u);
}

fn k_lanes() -> u32 {
    return select(lanes_of(params.record.k_dim), only_lanes, only_lanes > 0u);
}

fn v_lanes() -> u32 {
    return select(lanes_of(params.record.v_dim), only_lanes, only_lanes > 0u);
}

// The elements of the queries.
var<workgroup> asked: array<vec4<f32>, 256>;
// Scores, then weights, of the split's tokens; then the outputs that fold.
// What comes behind SCRATCH is for what threads tell each other of maxima and sums.
var<workgroup> stage: array<vec4<f32>, STAGE>;
const SCRATCH = 520u;

// Eight elements of four queries.
struct Query {
    e0: vec4<f32>,
    e1: vec4<f32>,
    e2: vec4<f32>,
    e3: vec4<f32>,
    e4: vec4<f32>,
    e5: vec4<f32>,
    e6: vec4<f32>,
    e7: vec4<f32>,
}

// A number for each of four tokens and four queries.
struct Products {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
}

// The scores of two tokens.
struct Scores {
    a: vec4<f32>,
    b: vec4<f32>,
}

// The state so far: what all threads know, and elements `thread` and THREADS + `thread`.
struct Running {
    m: vec4<f32>,
    l: vec4<f32>,
    near: vec4<f32>,
    far: vec4<f32>,
}

fn query_of(lane: u32) -> Query {
    let at = min(8u * lane, k_dim() - 8u);
    return Query(
        asked[at],
        asked[at + 1u],
        asked[at + 2u],
        asked[at + 3u],
        asked[at + 4u],
        asked[at + 5u],
        asked[at + 6u],
        asked[at + 7u],
    );
}

fn dot_eight(key: Eight, query: Query) -> vec4<f32> {
    var sum = vec4(key.a.x) * query.e0;
    sum = fma(vec4(key.a.y), query.e1, sum);
    sum = fma(vec4(key.a.z), query.e2, sum);
    sum = fma(vec4(key.a.w), query.e3, sum);
    sum = fma(vec4(key.b.x), query.e4, sum);
    sum = fma(vec4(key.b.y), query.e5, sum);
    sum = fma(vec4(key.b.z), query.e6, sum);
    return fma(vec4(key.b.w), query.e7, sum);
}

fn products(keys: Rows, query: Query) -> Products {
    return Products(
        dot_eight(eight_a(keys), query),
        dot_eight(eight_b(keys), query),
        dot_eight(eight_c(keys), query),
        dot_eight(eight_d(keys), query),
    );
}

// The frame that holds a token of the tile's sequence.
fn token_place(tile: Tile, token: u32) -> Place {
    return frame_place(params.record, tables[tile.table + (token >> params.record.page_shift)]);
}

fn slot_of(token: u32) -> u32 {
    return token & ((1u << params.record.page_shift) - 1u);
}

// The values of four tokens by their weights, which start at `at`.
fn add_values(outputs: Outputs, values: Rows, at: u32) -> Outputs {
    var sum = add_value(outputs, eight_a(values), stage[at]);
    sum = add_value(sum, eight_b(values), stage[at + 1u]);
    sum = add_value(sum, eight_c(values), stage[at + 2u]);
    return add_value(sum, eight_d(values), stage[at + 3u]);
}

// The scores of tokens `thread` and THREADS + `thread`.
fn scores_at(lanes: Lanes, thread: u32, scales: vec2<f32>) -> Scores {
    let a = stage[thread] * scales.x * params.scale_log2;
    let b = stage[THREADS + thread] * scales.y * params.scale_log2;
    return Scores(
        select(vec4(LOWEST), a, sees(lanes, thread)),
        select(vec4(LOWEST), b, sees(lanes, THREADS + thread)),
    );
}

fn weights_of(lanes: Lanes, scores: Scores, top: vec4<f32>, thread: u32) -> Scores {
    return Scores(
        select(vec4(0.0), weights(scores.a - top), sees(lanes, thread)),
        select(vec4(0.0), weights(scores.b - top), sees(lanes, THREADS + thread)),
    );
}

fn stage_weights(p: Scores, thread: u32, scales: vec2<f32>) {
    stage[thread] = weigh_value(p.a, scales.x);
    stage[THREADS + thread] = weigh_value(p.b, scales.y);
}

// The state of this split, whose outputs are left in `stage`, comes to those before.
fn plus_split(total: Running, top: vec4<f32>, l: vec4<f32>, thread: u32) -> Running {
    let step = step_to(total.m, total.l, top, l);
    var sum = Running(step.m, add(step, total.l, l), total.near, total.far);
    if (thread < v_dim()) {
        sum.near = add(step, total.near, left_element(thread));
    }
    if (THREADS + thread < v_dim()) {
        sum.far = add(step, total.far, left_element(THREADS + thread));
    }
    return sum;
}

fn write_states(lanes: Lanes, total: Running, constant: vec4<f32>, thread: u32) {
    for (var lane = 0u; lane < 4u; lane++) {
        if (lanes.to_token[lane] == 0u) {
            continue;
        }
        let at = lanes.state[lane];
        if (thread < v_dim()) {
            states[at + thread] = total.near[lane];
        }
        if (THREADS + thread < v_dim()) {
            states[at + THREADS + thread] = total.far[lane];
        }
        if (thread == 0u) {
            states[at + v_dim()] = total.m[lane];
            states[at + v_dim() + 1u] = total.l[lane];
            states[at + v_dim() + 2u] = constant[lane];
            states[at + v_dim() + 3u] = 0.0;
        }
    }
}

// Workgroups: x numbers the block of query vectors, y and z the pair of work item and KV head.
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
    let first_vector = 4u * workgroup.x;
    if (first_vector >= tile.rows * params.group) {
        return;
    }
    let part = tile.split + item - tile.item;
    let part_lanes = load_lanes(tile, part, kv_head, first_vector);
    for (var element = thread; element < k_dim(); element += THREADS) {
        stage_query(part_lanes, kv_head, element);
    }
    workgroupBarrier();
    var constant = vec4(0.0);
    if (KEYS_HAVE_MEANS) {
        sum_products(thread);
        workgroupBarrier();
        constant = product();
        workgroupBarrier();
    }

    let key_lane = thread & (k_lanes() - 1u);
    let value_lane = thread & (v_lanes() - 1u);
    var total = Running(vec4(LOWEST), vec4(0.0), vec4(0.0), vec4(0.0));
    for (var skipped = 0u; skipped < (1u << params.split_shift); skipped += SPLIT) {
        let first = (part << params.split_shift) + skipped;
        let lanes = lanes_of_split(part_lanes, skipped);
        let span = span_of(lanes);
        if (span.from_token >= span.to_token) {
            continue;
        }
        if (skipped > 0u) {
            // Threads may still read what the split before left in `stage`.
            workgroupBarrier();
        }
        let scales = load_scales(tile, kv_head, first, span, thread);

        // 1. Rows have their lanes, four or eight rows at once, which lie in one page; what no query sees is not read.
        let query = query_of(key_lane);
        let key_block = lane_rows * THREADS / k_lanes();
        for (var block = span.from_token & ~(key_block - 1u); block < span.to_token; block += key_block) {
            let token = block + lane_rows * (thread / k_lanes());
            var keys = Rows();
            var next_keys = Rows();
            if (8u * key_lane < k_dim() && some_seen(span, token, lane_rows)) {
                let place = token_place(tile, first + token);
                let word = key_word(record, kv_head, slot_of(first + token));
                keys = load_rows(place, word, record.k_row_words, key_lane);
                if (lane_rows == 8u) {
                    next_keys = load_rows(place, word + 4u * record.k_row_words, record.k_row_words, key_lane);
                }
            }
            add_up(products(keys, query), token, key_lane);
            if (lane_rows == 8u) {
                add_up(products(next_keys, query), token + 4u, key_lane);
            }
            if (SUMS_ARE_LEFT) {
                workgroupBarrier();
                if (thread < key_block) {
                    stage[block + thread] = left_sum(thread);
                }
                workgroupBarrier();
            }
        }
        workgroupBarrier();

        // 2. A thread has two tokens.
        let scores = scores_at(lanes, thread, scales.keys);
        leave_maximum(max(scores.a, scores.b), thread);
        workgroupBarrier();
        if (PARTS_ARE_LEFT) {
            fold_maxima(thread);
            workgroupBarrier();
        }
        let top = maximum();
        let p = weights_of(lanes, scores, top, thread);
        stage_weights(p, thread, scales.values);
        leave_sum(p.a + p.b, thread);
        workgroupBarrier();

        // 3. As in the first step, but for the values.
        var outputs = Outputs();
        let value_block = lane_rows * THREADS / v_lanes();
        for (var block = span.from_token & ~(value_block - 1u); block < span.to_token; block += value_block) {
            let token = block + lane_rows * (thread / v_lanes());
            if (8u * value_lane >= v_dim() || !some_seen(span, token, lane_rows)) {
                continue;
            }
            let place = token_place(tile, first + token);
            let word = value_word(record, kv_head, slot_of(first + token));
            var values = load_rows(place, word, record.v_row_words, value_lane);
            var next_values = Rows();
            if (lane_rows == 8u) {
                next_values = load_rows(place, word + 4u * record.v_row_words, record.v_row_words, value_lane);
            }
            if (!all_see(span, token, lane_rows)) {
                values = finite(values);
                next_values = finite(next_values);
            }
            outputs = add_values(outputs, values, token);
            if (lane_rows == 8u) {
                outputs = add_values(outputs, next_values, token + 4u);
            }
        }
        if (PARTS_ARE_LEFT) {
            fold_sums(thread);
        }
        workgroupBarrier();

        // 4. The upper half of the threads hands over to the lower half, and that to who has the element of the state.
        if (thread >= FOLDING) {
            leave(outputs, thread - FOLDING);
        }
        workgroupBarrier();
        if (thread < FOLDING) {
            leave(add_left(outputs, thread), thread);
        }
        workgroupBarrier();
        total = plus_split(total, top, sum_of_weights(), thread);
    }
    write_states(part_lanes, total, constant, thread);
}
