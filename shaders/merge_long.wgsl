// How do the many states of an output row fold into its output? As in merge.wgsl and to the same bits. A workgroup takes
// sixteen elements of one head. Of 32 sections at a time each has four threads with four elements; what a section and those
// before it are multiplied by follows from their maxima alone; and what is left in order is one multiply-add a section.

const SECTIONS = 32u;

// What the sections have come to: their elements; maximum, sum and constant.
var<workgroup> elements: array<vec4<f32>, 128>;
var<workgroup> tails: array<vec4<f32>, 32>;
// How they come to those before: what either side is multiplied by, the maximum, and 1 where nothing came before.
var<workgroup> links: array<vec4<f32>, 32>;

// The state at a place, counted from where the row's first section starts.
fn load_place(sources: MergeRow, place: u32, head: u32, element: u32) -> Total {
    if (place >= sources.before && place - sources.before < sources.states) {
        return load_state(sources.state + place - sources.before, head, element);
    }
    return nothing();
}

// The states of a section: one or four.
struct Loaded {
    a: Total,
    b: Total,
    c: Total,
    d: Total,
}

fn load_section(sources: MergeRow, place: u32, head: u32, element: u32) -> Loaded {
    let a = load_place(sources, place, head, element);
    if (params.section == 1u) {
        return Loaded(a, nothing(), nothing(), nothing());
    }
    return Loaded(
        a,
        load_place(sources, place + 1u, head, element),
        load_place(sources, place + 2u, head, element),
        load_place(sources, place + 3u, head, element),
    );
}

fn fold_section(states: Loaded) -> Total {
    let first = plus(nothing(), states.a);
    if (params.section == 1u) {
        return first;
    }
    return plus(plus(plus(first, states.b), states.c), states.d);
}

// The maximum so far, and whether there is any, behind a section that counts.
fn plus_tail(before: vec2<f32>, tail: vec4<f32>, counts: bool) -> vec2<f32> {
    let m = step_to(vec4(before.x), vec4(before.y), vec4(tail.x), vec4(tail.y)).m.x;
    return select(before, vec2(m, select(before.y, 1.0, tail.y != 0.0)), counts);
}

// How a section comes to those before it.
fn link_of(section: u32, total: Total) -> vec4<f32> {
    var before = vec2(total.m, total.l);
    for (var i = 0u; i < SECTIONS; i += 4u) {
        let a = tails[i];
        let b = tails[i + 1u];
        let c = tails[i + 2u];
        let d = tails[i + 3u];
        before = plus_tail(before, a, i < section);
        before = plus_tail(before, b, i + 1u < section);
        before = plus_tail(before, c, i + 2u < section);
        before = plus_tail(before, d, i + 3u < section);
    }
    let own = tails[section];
    let step = step_to(vec4(before.x), vec4(before.y), vec4(own.x), vec4(own.y));
    return vec4(step.keep.x, step.take.x, step.m.x, select(0.0, 1.0, step.first.x));
}

// A section comes to those before, with what `links` says of it.
fn plus_linked(total: Total, o: vec4<f32>, tail: vec4<f32>, link: vec4<f32>) -> Total {
    let step = Step(vec4(link.z), vec4(link.x), vec4(link.y), vec4(link.w == 1.0), vec4(tail.y == 0.0));
    let l = add(step, vec4(total.l), vec4(tail.y)).x;
    return Total(add(step, total.o, o), step.m.x, l, select(total.c, tail.z, step.first.x));
}

// All sections of a round come to those before, four of them loaded at a time; `lane` says which four of the elements.
fn plus_round(total: Total, lane: u32) -> Total {
    var sum = total;
    for (var i = 0u; i < SECTIONS; i += 4u) {
        let at = 4u * i + lane;
        let a = elements[at];
        let b = elements[at + 4u];
        let c = elements[at + 8u];
        let d = elements[at + 12u];
        sum = plus_linked(sum, a, tails[i], links[i]);
        sum = plus_linked(sum, b, tails[i + 1u], links[i + 1u]);
        sum = plus_linked(sum, c, tails[i + 2u], links[i + 2u]);
        sum = plus_linked(sum, d, tails[i + 3u], links[i + 3u]);
    }
    return sum;
}

// Workgroups: x and y number the head's piece of sixteen elements, the head and the row.
@compute @workgroup_size(128)
fn merge(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let number = group.y * FOLD + group.x;
    let pieces = (params.v_dim + 15u) >> 4u;
    let head = (number / pieces) % params.q_heads;
    let row = (number / pieces) / params.q_heads;
    if (row >= params.rows) {
        return;
    }
    let element = ((number % pieces) << 4u) + ((thread & 3u) << 2u);
    let present = element < params.v_dim;
    let loaded_element = select(0u, element, present);
    let own = thread >> 2u;
    let sources = load_merge_row(row);
    let end = sources.before + sources.states;
    let round = SECTIONS * params.section;
    // Only the threads that have a section know what all have come to.
    var total = nothing();
    var states = load_section(sources, own * params.section, head, loaded_element);
    for (var done = 0u; done < end; done += round) {
        let section = fold_section(states);
        elements[thread] = section.o;
        if ((thread & 3u) == 0u) {
            tails[own] = vec4(section.m, section.l, section.c, 0.0);
        }
        // The next round's are under way while this one folds.
        states = load_section(sources, done + round + own * params.section, head, loaded_element);
        workgroupBarrier();
        if (thread < SECTIONS) {
            links[thread] = link_of(thread, total);
        }
        workgroupBarrier();
        if (thread < SECTIONS) {
            total = plus_round(total, thread & 3u);
        }
        workgroupBarrier();
    }
    if (thread < 4u && present) {
        write_output(total, row, head, element);
    }
}
