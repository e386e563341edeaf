// How do the few states of an output row fold into its output? Those of a section in order, then the sections in order; each
// thread has four elements of one head.

// The states `at` .. `at` + 4 of a row, as far as it has them: nothing adds nothing.
struct Sources {
    a: Total,
    b: Total,
    c: Total,
    d: Total,
}

fn load_source(sources: MergeRow, at: u32, head: u32, element: u32) -> Total {
    if (at < sources.states) {
        return load_state(sources.state + at, head, element);
    }
    return nothing();
}

fn load_sources(sources: MergeRow, at: u32, head: u32, element: u32) -> Sources {
    return Sources(
        load_source(sources, at, head, element),
        load_source(sources, at + 1u, head, element),
        load_source(sources, at + 2u, head, element),
        load_source(sources, at + 3u, head, element),
    );
}

// What is folded: whole sections, and the one that lacks `missing` states.
struct Folded {
    total: Total,
    section: Total,
    missing: u32,
}

fn fold_one(folded: Folded, state: Total) -> Folded {
    let section = plus(folded.section, state);
    if (folded.missing == 1u) {
        return Folded(plus(folded.total, section), nothing(), params.section);
    }
    return Folded(folded.total, section, folded.missing - 1u);
}

fn fold_sections(sources: MergeRow, head: u32, element: u32) -> Total {
    var folded = Folded(nothing(), nothing(), params.section - sources.before);
    for (var i = 0u; i < sources.states; i += 4u) {
        let four = load_sources(sources, i, head, element);
        folded = fold_one(folded, four.a);
        folded = fold_one(folded, four.b);
        folded = fold_one(folded, four.c);
        folded = fold_one(folded, four.d);
    }
    return plus(folded.total, folded.section);
}

@compute @workgroup_size(64)
fn merge(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let number = (group.y * FOLD + group.x) * 64u + thread;
    let chunks = params.v_dim >> 2u;
    let element = (number % chunks) << 2u;
    let head = (number / chunks) % params.q_heads;
    let row = (number / chunks) / params.q_heads;
    if (row < params.rows) {
        write_output(fold_sections(load_merge_row(row), head, element), row, head, element);
    }
}
