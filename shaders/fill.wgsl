// How does a range of words get one value?

struct FillParams {
    first: u32,
    words: u32,
    word: u32,
    reserved: u32,
}

@group(0) @binding(0) var<uniform> params: FillParams;
@group(1) @binding(0) var<storage, read_write> words: array<u32>;

@compute @workgroup_size(128)
fn fill(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    for (var at = group.x * 128u + thread; at < params.words; at += groups.x * 128u) {
        words[params.first + at] = params.word;
    }
}
