// What does every kernel get from the host? A uniform block of its own, and rows of words in one buffer.
// Structs are those of src/backend/params.rs, field by field.

// A strided tensor view [row, head, element], in elements.
struct ViewParams {
    base: u32,
    row: u32,
    head: u32,
    element: u32,
}

// Rows (runs, moves, tiles, ...) that a call's `..._at` parameters point into.
@group(0) @binding(1) var<storage, read> descriptors: array<u32>;

// Workgroups a dimension: larger counts are folded into the next one.
const FOLD = 65535u;

fn element_at(view: ViewParams, row: u32, head: u32, element: u32) -> u32 {
    return view.base + row * view.row + head * view.head + element * view.element;
}
