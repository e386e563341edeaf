//! How fast are the keys of pages projected, beside a plain read of as many bytes?

use super::cast::Cast;
use super::predicted::Predicted;
use super::scene::each_scene;
use super::timer::{Flush, Timer};
use super::{Measure, Row, limits};
use kvtide::{Backend, PageFormat};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Sequences x tokens : query heads / KV heads / elements / page: a long append, and a sequence as a whole.
    #[arg(long, value_delimiter = ',', default_value = "1x8192:32/8/128/16,1x131072:32/8/128/16")]
    shape: Vec<Cast>,
    /// Dimensions of a projected key.
    #[arg(long, default_value_t = 32)]
    rank: u32,
}

impl Measure for Args {
    fn name(&self) -> &'static str {
        "project"
    }

    fn measure(&self, timer: &mut Timer<'_>, formats: &[PageFormat], rows: &mut Vec<Row>) -> anyhow::Result<()> {
        let device = timer.device;
        each_scene(timer, &self.shape, formats, |timer, cast, scene| {
            let predicted = Predicted::new(device, &mut timer.stream, scene, self.rank)?;
            // Keys are half of what attention reads. A projected key comes with its norm.
            let bytes = scene.bytes() / 2 + predicted.keys(scene) * (predicted.layout.key_bytes() + 4);
            for flush in Flush::BOTH {
                let us = timer.median_us(flush, |stream| device.project(stream, &predicted.project(scene)))?;
                let read = limits::read_us(timer, flush, bytes)?;
                let shape = format!("{cast}, rank {}", self.rank);
                let row = Row::kernel("project", shape, scene.record.format().name(), device, (us, bytes));
                rows.push(row.flushed(flush.name()).beside_us("a plain read of as many bytes", read));
            }
            Ok(())
        })
    }
}
