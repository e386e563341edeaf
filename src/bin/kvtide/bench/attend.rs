//! How fast is attention over pages, beside a plain read of the same bytes?

use super::cast::Cast;
use super::scene::each_scene;
use super::timer::{Flush, Timer};
use super::{Measure, Row, limits};
use kvtide::PageFormat;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Shapes: sequences x tokens : query heads / KV heads / elements / page.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1x131072:32/8/128/16,64x4096:32/8/128/16,16x8192:32/8/128/16,1x8192:32/8/128/16,\
                         1x131072:64/8/128/16,16x8192:28/4/128/16,16x8192:16/2/64/16"
    )]
    shape: Vec<Cast>,
    /// Query rows a sequence: 1 is a decode step, more are the last tokens of a prefill chunk.
    #[arg(long, default_value_t = 1)]
    rows: u32,
}

impl Measure for Args {
    fn name(&self) -> &'static str {
        "attend"
    }

    fn measure(&self, timer: &mut Timer<'_>, formats: &[PageFormat], rows: &mut Vec<Row>) -> anyhow::Result<()> {
        let device = timer.device;
        each_scene(timer, &self.shape, formats, |timer, cast, scene| {
            let each = self.rows.clamp(1, cast.tokens);
            let ask = scene.ask(device, each)?;
            let format = scene.record.format().name();
            for flush in Flush::BOTH {
                let us = timer.median_us(flush, |stream| scene.attend(device, stream, &ask))?;
                let read = limits::read_us(timer, flush, scene.bytes())?;
                let row = Row::kernel("attend", shape_of(&cast.to_string(), each), format, device, (us, scene.bytes()));
                let mut row = row.flushed(flush.name()).beside_us("a plain read of the same bytes", read);
                if each > 1 {
                    // What is read once says little about work that many rows share.
                    row.note("tflops", operations(cast, each) as f64 / us / 1e6);
                    row.note("calls", ask.calls());
                }
                rows.push(row);
            }
            Ok(())
        })
    }
}

/// How a row names its shape: a decode step by what it attends alone.
pub(super) fn shape_of(cast: &str, rows: u32) -> String {
    if rows > 1 { format!("{cast}, {rows} rows each") } else { cast.to_owned() }
}

/// Multiplications and additions: two for each element of the keys and of the values that a row's query heads see. The last
/// row sees all tokens, the one before it one less.
fn operations(cast: &Cast, rows: u32) -> u64 {
    let [q_heads, _, dim, _] = cast.heads.map(u64::from);
    let (tokens, rows) = (u64::from(cast.tokens), u64::from(rows));
    let seen = rows * tokens - rows * (rows - 1) / 2;
    4 * u64::from(cast.sequences) * seen * q_heads * dim
}

#[cfg(test)]
#[test]
fn operations_count_what_each_row_sees() {
    let cast: Cast = "3x100:8/2/64/16".parse().unwrap();
    for rows in [1, 2, 37, 100] {
        let seen: u64 = (0..rows).map(|before| u64::from(cast.tokens - before)).sum();
        assert_eq!(operations(&cast, rows), 3 * seen * 8 * 64 * 4, "{rows} rows");
    }
    // A chunk of 2,048 rows at the end of 32,768 tokens, 32 heads of 128.
    let cast: Cast = "1x32768:32/8/128/16".parse().unwrap();
    assert_eq!(operations(&cast, 2048), 1_065_168_666_624);
}
