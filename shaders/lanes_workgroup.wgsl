// How do the lanes of a key's row add up without subgroups? Each leaves its sums for four tokens in workgroup memory, and
// one thread a token adds them. Behind the scores' 256 places of `stage` room for all sums.

const STAGE = 768u;
const SUMS_ARE_LEFT = true;
const PARTS_ARE_LEFT = true;
// A maximum of each thread, then of sixteen; and, while the weights stand before them, the sums.
const MAXIMA = SCRATCH;
const SUMS = 256u;
const PARTS = SCRATCH + 128u;

// There is no room for them in workgroup memory.
var<private> kept: Lanes;

fn keep_lanes(lanes: Lanes, thread: u32) {
    kept = lanes;
}

fn kept_lanes() -> Lanes {
    return kept;
}

// Where a lane leaves its sum for the token `row` of the block: lanes of a row, and rows of a lane, are in different banks.
fn left_at(row: u32, lane: u32) -> u32 {
    return SPLIT + row * k_lanes() + (lane ^ (row & (k_lanes() - 1u)));
}

fn add_up(mine: Products, at: u32, lane: u32) {
    let row = at & (4u * THREADS / k_lanes() - 1u);
    stage[left_at(row, lane)] = mine.a;
    stage[left_at(row + 1u, lane)] = mine.b;
    stage[left_at(row + 2u, lane)] = mine.c;
    stage[left_at(row + 3u, lane)] = mine.d;
}

fn left_sum(row: u32) -> vec4<f32> {
    var sum = vec4(0.0);
    for (var lane = 0u; lane < k_lanes(); lane++) {
        sum += stage[left_at(row, lane)];
    }
    return sum;
}

fn leave_maximum(mine: vec4<f32>, thread: u32) {
    stage[MAXIMA + thread] = mine;
}

// Sixteen threads take eight places each.
fn fold_maxima(thread: u32) {
    if (thread < 16u) {
        var top = vec4(LOWEST);
        for (var i = thread; i < THREADS; i += 16u) {
            top = max(top, stage[MAXIMA + i]);
        }
        stage[PARTS + thread] = top;
    }
}

fn maximum() -> vec4<f32> {
    var top = vec4(LOWEST);
    for (var i = 0u; i < 16u; i++) {
        top = max(top, stage[PARTS + i]);
    }
    return top;
}

fn leave_sum(mine: vec4<f32>, thread: u32) {
    stage[SUMS + thread] = mine;
}

fn fold_sums(thread: u32) {
    if (thread < 16u) {
        var sum = vec4(0.0);
        for (var i = thread; i < THREADS; i += 16u) {
            sum += stage[SUMS + i];
        }
        stage[PARTS + thread] = sum;
    }
}

fn sum_of_weights() -> vec4<f32> {
    var sum = vec4(0.0);
    for (var i = 0u; i < 16u; i++) {
        sum += stage[PARTS + i];
    }
    return sum;
}
