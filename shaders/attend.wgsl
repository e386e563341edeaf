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
// lanes add up to lanes_subgroup.wgsl and lanes_workgroup.wgsl, how threads fold to fold_subgroup.wgsl and
// fold_workgroup.wgsl.

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

// The elements of the queries: the i-th eighths of all lanes side by side.
var<workgroup> asked: array<vec4<f32>, ASKED>;
// Scores, then weights, of the split's tokens; then the outputs that fold.
// What comes behind SCRATCH is for what threads tell each other of maxima and sums.
var<workgroup> stage: array<vec4<f32>, STAGE>;
const SCRATCH = max(SPLIT, FOLDS);

// Where an element of the queries is.
fn asked_at(element: u32) -> u32 {
    return (element & 7u) * k_lanes() + (element >> 3u);
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

// What a lane's elements of four keys add to the scores. `at` is that of its queries.
fn products(keys: Rows, at: u32) -> Products {
    let a = eight_a(keys);
    let b = eight_b(keys);
    let c = eight_c(keys);
    let d = eight_d(keys);
    let apart = k_lanes();
    let q = asked[at];
    var sum = Products(vec4(a.a.x) * q, vec4(b.a.x) * q, vec4(c.a.x) * q, vec4(d.a.x) * q);
    sum = plus_product(sum, vec4(a.a.y, b.a.y, c.a.y, d.a.y), asked[at + apart]);
    sum = plus_product(sum, vec4(a.a.z, b.a.z, c.a.z, d.a.z), asked[at + 2u * apart]);
    sum = plus_product(sum, vec4(a.a.w, b.a.w, c.a.w, d.a.w), asked[at + 3u * apart]);
    sum = plus_product(sum, vec4(a.b.x, b.b.x, c.b.x, d.b.x), asked[at + 4u * apart]);
    sum = plus_product(sum, vec4(a.b.y, b.b.y, c.b.y, d.b.y), asked[at + 5u * apart]);
    sum = plus_product(sum, vec4(a.b.z, b.b.z, c.b.z, d.b.z), asked[at + 6u * apart]);
    return plus_product(sum, vec4(a.b.w, b.b.w, c.b.w, d.b.w), asked[at + 7u * apart]);
}

// An element more of the four keys, and of the queries.
fn plus_product(sum: Products, key: vec4<f32>, q: vec4<f32>) -> Products {
    return Products(
        fma(vec4(key.x), q, sum.a),
        fma(vec4(key.y), q, sum.b),
        fma(vec4(key.z), q, sum.c),
        fma(vec4(key.w), q, sum.d),
    );
}

// Four rows, and the next four where lanes load eight.
struct Pair {
    near: Rows,
    far: Rows,
}

// The frame that holds a token of the tile's sequence.
fn token_place(tile: Tile, token: u32) -> Place {
    return frame_place(params.record, tables[tile.table + (token >> params.record.page_shift)]);
}

fn slot_of(token: u32) -> u32 {
    return token & ((1u << params.record.page_shift) - 1u);
}

// A lane's elements of the keys from a token of the split on, which lie in one page; none where no query sees any of them.
fn load_keys(tile: Tile, first: u32, span: Span, token: u32, kv_head: u32, lane: u32) -> Pair {
    if (8u * lane >= k_dim() || !some_seen(span, token, lane_rows)) {
        return Pair();
    }
    let stride = params.record.k_row_words;
    return load_pair(tile, first + token, key_word(params.record, kv_head, slot_of(first + token)), stride, lane);
}

fn load_values(tile: Tile, first: u32, span: Span, token: u32, kv_head: u32, lane: u32) -> Pair {
    if (8u * lane >= v_dim() || !some_seen(span, token, lane_rows)) {
        return Pair();
    }
    let stride = params.record.v_row_words;
    return load_pair(tile, first + token, value_word(params.record, kv_head, slot_of(first + token)), stride, lane);
}

fn load_pair(tile: Tile, token: u32, word: u32, stride: u32, lane: u32) -> Pair {
    let place = token_place(tile, token);
    if (lane_rows == 4u) {
        return Pair(load_rows(place, word, stride, lane), Rows());
    }
    return Pair(load_rows(place, word, stride, lane), load_rows(place, word + 4u * stride, stride, lane));
}

// Where the block of a split's rows begins that holds a token.
fn block_of(token: u32, lanes: u32) -> u32 {
    return token & ~(lane_rows * THREADS / lanes - 1u);
}

// The token in its block of the first row of a thread.
fn own_rows(thread: u32, lanes: u32) -> u32 {
    return lane_rows * (thread / lanes);
}

// The keys of the block that holds token `skipped` of the part. These are the lanes of the part.
fn load_first_keys(tile: Tile, part_first: u32, lanes: Lanes, skipped: u32, kv_head: u32, thread: u32) -> Pair {
    let before = skipped & ~(SPLIT - 1u);
    let token = block_of(skipped - before, k_lanes()) + own_rows(thread, k_lanes());
    let span = span_of(lanes_of_split(lanes, before));
    return load_keys(tile, part_first + before, span, token, kv_head, thread & (k_lanes() - 1u));
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

// The values of a block's tokens that some query does not see: row by row, not to lengthen the kernel.
fn add_finite_values(outputs: Outputs, tile: Tile, first: u32, span: Span, token: u32, kv_head: u32, lane: u32) -> Outputs {
    let place = token_place(tile, first + token);
    var word = value_word(params.record, kv_head, slot_of(first + token));
    var sum = outputs;
    for (var at = token; at < min(token + lane_rows, span.to_token); at++) {
        sum = add_value(sum, load_finite(place, word, lane), stage[at]);
        word += params.record.v_row_words;
    }
    return sum;
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
    let tile = find_tile(item, thread);
    let first_vector = 4u * workgroup.x;
    if (first_vector >= tile.rows * params.group) {
        return;
    }
    let part = tile.split + item - tile.item;
    let part_lanes = load_lanes(tile, part, kv_head, first_vector);
    let part_first = part << params.split_shift;
    let part_span = span_of(part_lanes);
    // Each split's first keys are under way while the one before it ends.
    var ahead = load_first_keys(tile, part_first, part_lanes, part_span.from_token, kv_head, thread);
    keep_lanes(part_lanes, thread);
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
    for (var skipped = part_span.from_token & ~(SPLIT - 1u); skipped < part_span.to_token; skipped += SPLIT) {
        // Which blocks there are is the same for all threads; what their tokens are to queries is asked again.
        let from_token = max(part_span.from_token, skipped) - skipped;
        let to_token = min(part_span.to_token - skipped, SPLIT);
        let first = part_first + skipped;
        let span = span_of(lanes_of_split(kept_lanes(), skipped));
        // Threads may still read what the split before left in `stage`.
        workgroupBarrier();
        let scales = load_scales(tile, kv_head, first, span, thread);

        // 1. Rows have their lanes, four or eight rows at once, which lie in one page; what no query sees is not read.
        let query = min(key_lane, (k_dim() >> 3u) - 1u);
        let key_block = lane_rows * THREADS / k_lanes();
        let first_keys = block_of(from_token, k_lanes());
        for (var block = first_keys; block < to_token; block += key_block) {
            let token = block + own_rows(thread, k_lanes());
            if (block > first_keys) {
                ahead = load_keys(tile, first, span, token, kv_head, key_lane);
            }
            add_up(products(ahead.near, query), token, key_lane);
            if (lane_rows == 8u) {
                add_up(products(ahead.far, query), token + 4u, key_lane);
            }
            if (SUMS_ARE_LEFT) {
                workgroupBarrier();
                if (thread < key_block) {
                    stage[block + thread] = left_sum(thread);
                }
                workgroupBarrier();
            }
        }
        let value_block = lane_rows * THREADS / v_lanes();
        let first_values = block_of(from_token, v_lanes());
        let own_values = own_rows(thread, v_lanes());
        var values = load_values(tile, first, span, first_values + own_values, kv_head, value_lane);
        workgroupBarrier();

        // 2. A thread has two tokens.
        let lanes = lanes_of_split(kept_lanes(), skipped);
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
        for (var block = first_values; block < to_token; block += value_block) {
            let token = block + own_values;
            if (block > first_values) {
                values = load_values(tile, first, span, token, kv_head, value_lane);
            }
            if (8u * value_lane >= v_dim() || !some_seen(span, token, lane_rows)) {
                continue;
            }
            if (!VALUES_ARE_FINITE && !all_see(span, token, lane_rows)) {
                outputs = add_finite_values(outputs, tile, first, span, token, kv_head, value_lane);
                continue;
            }
            outputs = add_values(outputs, values.near, token);
            if (lane_rows == 8u) {
                outputs = add_values(outputs, values.far, token + 4u);
            }
        }
        ahead = load_first_keys(tile, part_first, kept_lanes(), skipped + SPLIT, kv_head, thread);
        if (PARTS_ARE_LEFT) {
            fold_sums(thread);
        }
        workgroupBarrier();

        // 4. What threads have of the same elements comes together, and the split to those before it.
        fold_outputs(outputs, thread);
        total = plus_split(total, top, sum_of_weights(), thread);
    }
    write_states(kept_lanes(), total, constant, thread);
}
