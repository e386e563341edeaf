// Which parameters does an append have that projects nothing?

struct AppendParams {
    record: RecordParams,
    k: ViewParams,
    v: ViewParams,
    dtype: u32,
    runs_at: u32,
    runs: u32,
    write: u32,
}

@group(0) @binding(0) var<uniform> params: AppendParams;
