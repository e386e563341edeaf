//! How fast are all pages of a sequence scored for a query, beside a plain read of their projected keys?

use super::cast::Cast;
use super::predicted::Predicted;
use super::scene::{Page, each_scene};
use super::timer::{Flush, Timer};
use super::{Measure, Row, limits, natural, tensor};
use kvtide::backend::DeviceMemory;
use kvtide::backend::ops::Score;
use kvtide::backend::params::{ProjectRun, ScoreEntry};
use kvtide::{Backend, DeviceBuffer, PageFormat};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Sequences x tokens : query heads / KV heads / elements / page. Each sequence has one query.
    #[arg(long, value_delimiter = ',', default_value = "1x131072:32/8/128/16,64x4096:32/8/128/16")]
    shape: Vec<Cast>,
    /// Dimensions of a projected key.
    #[arg(long, default_value_t = 32)]
    rank: u32,
}

impl Measure for Args {
    fn name(&self) -> &'static str {
        "score"
    }

    fn measure(&self, timer: &mut Timer<'_>, formats: &[PageFormat], rows: &mut Vec<Row>) -> anyhow::Result<()> {
        let device = timer.device;
        each_scene(timer, &self.shape, formats, |timer, cast, scene| {
            let predicted = Predicted::new(device, &mut timer.stream, scene, self.rank)?;
            device.project(&mut timer.stream, &predicted.project(scene))?;
            let (geometry, format) = (*scene.record.geometry(), scene.record.format());
            let (q_heads, sequences) = (geometry.q_heads(), u64::from(cast.sequences));
            let q = tensor(device, natural(format), sequences, [q_heads, geometry.k_dim()], 3)?;
            let pages = scene.pages().zip(&predicted.runs);
            let entry = |(page, run): (Page, &ProjectRun)| ScoreEntry {
                page: run.page,
                row: page.sequence,
                tokens: run.tokens,
                reserved: 0,
            };
            let entries: Vec<ScoreEntry> = pages.map(entry).collect();
            let scratch = Score::<DeviceMemory>::query_bytes(sequences, q_heads, self.rank);
            let queries = device.alloc("bench projected queries", scratch)?;
            let out = device.alloc("bench scores", entries.len() as u64 * 4)?;
            let score = Score {
                geometry,
                rank: self.rank,
                projections: predicted.arena(),
                q: &q,
                basis: predicted.basis(),
                queries: &queries,
                entries: &entries,
                out: &out,
            };
            let bytes = predicted.keys(scene) * predicted.layout.key_bytes() + out.bytes();
            for flush in Flush::BOTH {
                let us = timer.median_us(flush, |stream| device.score(stream, &score))?;
                let read = limits::read_us(timer, flush, bytes)?;
                let shape = format!("{cast}, rank {}", self.rank);
                let row = Row::kernel("score", shape, format.name(), device, (us, bytes));
                rows.push(row.flushed(flush.name()).beside_us("a plain read of as many bytes", read));
            }
            Ok(())
        })
    }
}
