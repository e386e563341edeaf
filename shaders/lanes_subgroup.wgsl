// How do the lanes of a key's row add up? By shuffles: the lanes of a row are part of one subgroup, of whatever size. Each of
// them starts with a sum of its own for four tokens, hands two on, then one, and ends with that of one token.

const STAGE = SCRATCH + 64u;
const SUMS_ARE_LEFT = false;
const PARTS_ARE_LEFT = false;
// What the lanes of each row tell of the maximum and the sum of their tokens.
const MAXIMA = SCRATCH;
const SUMS = SCRATCH + 32u;

// Many workgroups have to share a processor, since the threads of each wait for each other: what all of them know and rarely
// need is kept here and not in registers.
var<workgroup> kept: array<vec4<u32>, 3>;

fn keep_lanes(lanes: Lanes, thread: u32) {
    if (thread == 0u) {
        kept[0] = lanes.from_token;
        kept[1] = lanes.to_token;
        kept[2] = lanes.state;
    }
}

// All but their queries.
fn kept_lanes() -> Lanes {
    return Lanes(kept[0], kept[1], vec4(0u), kept[2]);
}

// Keeps one of two sums and adds the other lane's: the second where `upper`.
fn trade(low: vec4<f32>, high: vec4<f32>, upper: bool, mask: u32) -> vec4<f32> {
    return select(low, high, upper) + subgroupShuffleXor(select(high, low, upper), mask);
}

// The sums over the lanes go to `stage` from `at` on: lanes of the i-th quarter end with that of token i.
fn add_up(mine: Products, at: u32, lane: u32) {
    let half = k_lanes() >> 1u;
    let quarter = k_lanes() >> 2u;
    let upper = (lane & half) != 0u;
    var sum = trade(
        trade(mine.a, mine.c, upper, half),
        trade(mine.b, mine.d, upper, half),
        (lane & quarter) != 0u,
        quarter,
    );
    if (k_lanes() >= 32u) {
        sum += subgroupShuffleXor(sum, 4u);
    }
    if (k_lanes() >= 16u) {
        sum += subgroupShuffleXor(sum, 2u);
    }
    if (k_lanes() >= 8u) {
        sum += subgroupShuffleXor(sum, 1u);
    }
    if ((lane & (quarter - 1u)) == 0u) {
        stage[at + lane / quarter] = sum;
    }
}

fn left_sum(token: u32) -> vec4<f32> {
    return vec4(0.0);
}

fn leave_maximum(mine: vec4<f32>, thread: u32) {
    var top = max(mine, subgroupShuffleXor(mine, 1u));
    top = max(top, subgroupShuffleXor(top, 2u));
    if (k_lanes() >= 8u) {
        top = max(top, subgroupShuffleXor(top, 4u));
    }
    if (k_lanes() >= 16u) {
        top = max(top, subgroupShuffleXor(top, 8u));
    }
    if (k_lanes() >= 32u) {
        top = max(top, subgroupShuffleXor(top, 16u));
    }
    if ((thread & (k_lanes() - 1u)) == 0u) {
        stage[MAXIMA + thread / k_lanes()] = top;
    }
}

fn fold_maxima(thread: u32) {}

fn maximum() -> vec4<f32> {
    var top = vec4(LOWEST);
    for (var i = 0u; i < THREADS / k_lanes(); i++) {
        top = max(top, stage[MAXIMA + i]);
    }
    return top;
}

fn leave_sum(mine: vec4<f32>, thread: u32) {
    var sum = mine + subgroupShuffleXor(mine, 1u);
    sum += subgroupShuffleXor(sum, 2u);
    if (k_lanes() >= 8u) {
        sum += subgroupShuffleXor(sum, 4u);
    }
    if (k_lanes() >= 16u) {
        sum += subgroupShuffleXor(sum, 8u);
    }
    if (k_lanes() >= 32u) {
        sum += subgroupShuffleXor(sum, 16u);
    }
    if ((thread & (k_lanes() - 1u)) == 0u) {
        stage[SUMS + thread / k_lanes()] = sum;
    }
}

fn fold_sums(thread: u32) {}

fn sum_of_weights() -> vec4<f32> {
    var sum = vec4(0.0);
    for (var i = 0u; i < THREADS / k_lanes(); i++) {
        sum += stage[SUMS + i];
    }
    return sum;
}
