//! How fast is attention over pages, beside a plain read of the same bytes?

use super::scene::{Cast, each_scene};
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
    fn measure(&self, timer: &mut Timer<'_>, formats: &[PageFormat], rows: &mut Vec<Row>) -> anyhow::Result<()> {
        let device = timer.device;
        each_scene(timer, &self.shape, formats, |timer, cast, scene| {
            let ask = scene.ask(device, self.rows.clamp(1, cast.tokens))?;
            let format = scene.record.format().name();
            for flush in Flush::BOTH {
                let us = timer.median_us(flush, |stream| scene.attend(device, stream, &ask))?;
                let read = limits::read_us(timer, flush, scene.bytes())?;
                let shape = format!("{cast}, {} rows each", self.rows);
                let row = Row::kernel("attend", shape, format, device, (us, scene.bytes()));
                rows.push(row.flushed(flush.name()).beside_us("a plain read of the same bytes", read));
            }
            Ok(())
        })
    }
}
