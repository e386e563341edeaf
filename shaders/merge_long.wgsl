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

// A section of one state or four, all of which are loaded before they fold.
fn fold_section(sources: MergeRow, place: u32, head: u32, element: u32) -> Total {
    let a = load_place(sources, place, head, element);
    if (params.section == 1u) {
        return plus(nothing(), a);
    }
    let b = load_place(sources, place + 1u, head, element);
    let c = load_place(sources, place + 2u, head, element);
    let d = load_place(sources, place + 3u, head, element);
    return plus(plus(plus(plus(nothing(), a), b), c), d);
}

// A section comes to those before, with what `links` says of it.
fn plus_linked(total: Total, o: vec4<f32>, tail: vec4<f32>, link: vec4<f32>) -> Total {
    let step = Step(vec4(link.z), vec4(link.x), vec4(link.y), vec4(link.w == 1.0), vec4(tail.y == 0.0));
    let l = add(step, vec4(total.l), vec4(tail.y)).x;
    return Total(add(step, total.o, o), step.m.x, l, select(total.c, tail.z, step.first.x));
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
    let own = thread >> 2u;
    let sources = load_merge_row(row);
    let end = sources.before + sources.states;
    var total = nothing();
    for (var done = 0u; done < end; done += SECTIONS * params.section) {
        let section = fold_section(sources, done + own * params.section, head, select(0u, element, present));
        elements[thread] = section.o;
        if ((thread & 3u) == 0u) {
            tails[own] = vec4(section.m, section.l, section.c, 0.0);
        }
        workgroupBarrier();
        if (thread < SECTIONS) {
            var m = total.m;
            var l = total.l;
            for (var i = 0u; i < thread; i++) {
                let before = step_to(vec4(m), vec4(l), vec4(tails[i].x), vec4(tails[i].y));
                m = before.m.x;
                l = select(l, 1.0, tails[i].y != 0.0);
            }
            let step = step_to(vec4(m), vec4(l), vec4(tails[thread].x), vec4(tails[thread].y));
            links[thread] = vec4(step.keep.x, step.take.x, step.m.x, select(0.0, 1.0, step.first.x));
        }
        workgroupBarrier();
        // All threads know what it comes to, four of them what belongs where.
        for (var i = 0u; i < SECTIONS; i++) {
            total = plus_linked(total, elements[4u * i + (thread & 3u)], tails[i], links[i]);
        }
        workgroupBarrier();
    }
    if (thread < 4u && present) {
        write_output(total, row, head, element);
    }
}
