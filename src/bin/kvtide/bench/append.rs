//! How fast do new tokens get into pages, beside a copy of the same bytes?

use super::cast::Cast;
use super::scene::each_scene;
use super::timer::{Flush, Timer};
use super::{Measure, Row, natural, tensor};
use kvtide::backend::params::AppendRun;
use kvtide::{Backend, PageFormat};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Sequences x tokens that each gets : query heads / KV heads / elements / page.
    #[arg(long, value_delimiter = ',', default_value = "1x8192:32/8/128/16,64x1:32/8/128/16")]
    shape: Vec<Cast>,
}

impl Measure for Args {
    fn name(&self) -> &'static str {
        "append"
    }

    fn measure(&self, timer: &mut Timer<'_>, formats: &[PageFormat], rows: &mut Vec<Row>) -> anyhow::Result<()> {
        let device = timer.device;
        each_scene(timer, &self.shape, formats, |timer, cast, scene| {
            let (format, geometry) = (scene.record.format(), scene.record.geometry());
            let (dtype, heads) = (natural(format), [geometry.kv_heads(), geometry.k_dim()]);
            let total = u64::from(cast.sequences) * u64::from(cast.tokens);
            let (k, v) = (tensor(device, dtype, total, heads, 1)?, tensor(device, dtype, total, heads, 2)?);
            let mut first = 0;
            let runs = scene.pages().map(|page| {
                let (k_offset, v_offset) = (first, first);
                first += page.tokens * heads[0] * heads[1];
                let (frame, tokens) = (page.frame, page.tokens);
                AppendRun { k_offset, v_offset, frame, slot: 0, tokens, page: 0, reserved: [0; 2] }
            });
            let runs: Vec<AppendRun> = runs.collect();
            // What is read and what is written.
            let bytes = total * u64::from(heads[0] * heads[1]) * 2 * dtype.bytes() + scene.bytes();
            for flush in Flush::BOTH {
                let us = timer.median_us(flush, |stream| device.append(stream, &scene.append(&k, &v, &runs)))?;
                let copy = timer.copy_us(flush, bytes / 2)?;
                let row = Row::kernel("append", cast.to_string(), format.name(), device, (us, bytes));
                rows.push(row.flushed(flush.name()).beside_us("a copy of the same bytes", copy));
            }
            Ok(())
        })
    }
}
