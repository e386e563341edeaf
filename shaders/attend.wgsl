// What do query rows see in the pages? A workgroup takes one split of 256 tokens, or a section of such, one KV head and up to
// four query vectors (row × query head), and computes one mergeable state for each of them, a split at a time, in four steps:
//
// 1. scores: each thread multiplies two adjacent keys with the four queries;
// 2. softmax: the exact maximum of each query over the split, then the weights 2^(score - maximum);
// 3. values: threads own eight elements of the output each and every `groups`-th token, and fold in a fixed tree;
// 4. total: each thread adds one element or two of the split's state to those of the splits before it.
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

// The maximum of every 16th token's scores, and that of the sixteen maxima that `stage` has then.
fn sixteenth_maximum(first: u32) -> vec4<f32> {
    var best = vec4(LOWEST);
    for (var i = first; i < SPLIT; i += 16u) {
        best = max(best, scores[i]);
    }
    return best;
}

fn maximum() -> vec4<f32> {
    var top = vec4(LOWEST);
    for (var i = 0u; i < 16u; i++) {
        top = max(top, stage[MAXIMA + i]);
    }
    return top;
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
    let part = tile.split + item - tile.item;
    let all_lanes = load_lanes(tile, part, kv_head, first_vector);
    // The states so far: elements `thread` and THREADS + `thread`, and what all threads know.
    var near = vec4(0.0);
    var far = vec4(0.0);
    var total_m = vec4(LOWEST);
    var total_l = vec4(0.0);
    var constant = vec4(0.0);
    for (var skipped = 0u; skipped < (1u << params.split_shift); skipped += SPLIT) {
        let first = (part << params.split_shift) + skipped;
        let lanes = lanes_of_split(all_lanes, skipped);
        // Tokens that any lane sees: what no lane sees is not read.
        let unseen = lanes.to_token == vec4(0u);
        let starts = select(lanes.from_token, vec4(SPLIT), unseen);
        let from_token = min(min(starts.x, starts.y), min(starts.z, starts.w));
        let to_token = max(max(lanes.to_token.x, lanes.to_token.y), max(lanes.to_token.z, lanes.to_token.w));
        if (from_token >= to_token) {
            continue;
        }
        if (skipped > 0u) {
            // Threads may still read what the split before left in `stage`.
            workgroupBarrier();
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
            stage[MAXIMA + thread] = sixteenth_maximum(thread);
        }
        workgroupBarrier();
        let top = maximum();
        let p_a = select(vec4(0.0), weights(score_a - top), seen_a);
        let p_b = select(vec4(0.0), weights(score_b - top), seen_b);
        scores[token] = p_a;
        scores[token + 1u] = p_b;
        stage_weights(token, p_a, p_b, value_scales);
        if (thread == 0u) {
            constant = sum_constant();
        }
        workgroupBarrier();

        // 3. Threads are `groups` rows of `units`; group g takes tokens g, g + groups, ... of the split.
        let units = record.v_dim >> 3u;
        let groups = 1u << firstLeadingBit(THREADS / units);
        let group = thread / units;
        let unit = thread % units;
        var outputs = Outputs();
        if (group < groups) {
            let start = from_token + ((group - from_token) & (groups - 1u));
            for (var i = start; i < to_token; i += groups) {
                let slot = (first + i) & ((1u << record.page_shift) - 1u);
                let place = token_place(tile, first + i);
                outputs = add_value(outputs, load_value(place, kv_head, slot, unit), value_weight(i), scores[i]);
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
                leave(outputs, (group & wrap) * units + unit);
            }
            workgroupBarrier();
            if (group < width) {
                outputs = add_left(outputs, ((group + width) & wrap) * units + unit);
            }
        }
        if (group == 0u) {
            leave(outputs, unit);
        }
        workgroupBarrier();

        // 4. The states of this split come to those before it.
        let l = left_sum();
        let step = step_to(total_m, total_l, top, l);
        total_m = step.m;
        total_l = add(step, total_l, l);
        near = add(step, near, left_element(thread));
        far = add(step, far, left_element(THREADS + thread));
    }
    for (var lane = 0u; lane < 4u; lane++) {
        if (all_lanes.to_token[lane] == 0u) {
            continue;
        }
        let at = all_lanes.state[lane];
        if (thread < record.v_dim) {
            states[at + thread] = near[lane];
        }
        if (THREADS + thread < record.v_dim) {
            states[at + THREADS + thread] = far[lane];
        }
        if (thread == 0u) {
            let tail = at + record.v_dim;
            states[tail] = total_m[lane];
            states[tail + 1u] = total_l[lane];
            states[tail + 2u] = constant[lane];
            states[tail + 3u] = 0.0;
        }
    }
}
