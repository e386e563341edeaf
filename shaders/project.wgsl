// How are stored keys projected on a basis? A workgroup takes eight tokens of one run and KV head, whose keys it decodes
// once.

struct ProjectParams {
    record: RecordParams,
    projections: ProjectionParams,
    basis_base: u32,
    basis_stride: u32,
    runs_at: u32,
    runs: u32,
}

@group(0) @binding(0) var<uniform> params: ProjectParams;
@group(1) @binding(0) var<storage, read> basis: array<u32>;
// One slab of records: the host makes a call for each.
@group(1) @binding(1) var<storage, read_write> projected: array<u32>;

const THREADS = 64u;

fn load_run(at: u32) -> ProjectRun {
    return ProjectRun(descriptors[at], descriptors[at + 1u], descriptors[at + 2u], descriptors[at + 3u]);
}

// Workgroups: y and z number the run, x strides over its KV heads and tiles.
@compute @workgroup_size(64)
fn project(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = group.z * FOLD + group.y;
    if (number >= params.runs) {
        return;
    }
    let run = load_run(params.runs_at + 4u * number);
    let tiles = (run.tokens + TILE - 1u) / TILE;
    for (var work = group.x; work < tiles * params.record.kv_heads; work += groups.x) {
        let head = work / tiles;
        let first = work % tiles * TILE;
        workgroupBarrier();
        for (var i = thread; i < (params.record.k_dim >> 2u); i += THREADS) {
            stage_part(run, head, first, i);
        }
        workgroupBarrier();
        for (var i = thread; i < params.projections.rank; i += THREADS) {
            project_part(run, head, first, i);
        }
    }
}
