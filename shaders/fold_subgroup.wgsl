// How do threads that have the same elements of the outputs fold them? The lanes of two rows are in one subgroup: they trade
// halves of what they have by shuffles. Then, through `stage`, the upper half of the threads hands over to the lower half, and
// that to who has the element of the state; four vectors for each of FOLDING.

const FOLDING = 64u;
// Vectors from an element to the next: those that are read together are in different banks.
const APART = 65u;
const FOLDS = 4u * APART;

// Four elements: the lower or the upper half of a lane's.
struct Half {
    o0: vec4<f32>,
    o1: vec4<f32>,
    o2: vec4<f32>,
    o3: vec4<f32>,
}

fn fold_outputs(outputs: Outputs, thread: u32) {
    let mask = v_lanes();
    let upper = (thread & mask) != 0u;
    let half = Half(
        trade(outputs.o0, outputs.o4, upper, mask),
        trade(outputs.o1, outputs.o5, upper, mask),
        trade(outputs.o2, outputs.o6, upper, mask),
        trade(outputs.o3, outputs.o7, upper, mask),
    );
    if (thread >= FOLDING) {
        leave(half, thread - FOLDING);
    }
    workgroupBarrier();
    if (thread < FOLDING) {
        leave(add_left(half, thread), thread);
    }
    workgroupBarrier();
}

fn leave(half: Half, at: u32) {
    stage[at] = half.o0;
    stage[at + APART] = half.o1;
    stage[at + 2u * APART] = half.o2;
    stage[at + 3u * APART] = half.o3;
}

fn add_left(half: Half, at: u32) -> Half {
    return Half(
        half.o0 + stage[at],
        half.o1 + stage[at + APART],
        half.o2 + stage[at + 2u * APART],
        half.o3 + stage[at + 3u * APART],
    );
}

// The sum of what is left of an element.
fn left_element(element: u32) -> vec4<f32> {
    var sum = vec4(0.0);
    let own = (element >> 3u) + select(0u, v_lanes(), (element & 4u) != 0u);
    for (var at = own; at < FOLDING; at += 2u * v_lanes()) {
        sum += stage[(element & 3u) * APART + at];
    }
    return sum;
}
