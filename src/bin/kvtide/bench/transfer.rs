//! How fast are pages copied and gathered, beside a copy of the same bytes?

use super::cast::Cast;
use super::scene::Scene;
use super::timer::{Flush, Timer};
use super::{Measure, Row};
use kvtide::backend::ops::{Place, Transfer};
use kvtide::backend::params::Move;
use kvtide::{Backend, PageFormat};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Pages that move.
    #[arg(long, default_value_t = 4096)]
    pages: u32,
    /// The pages' shape: query heads / KV heads / elements / page.
    #[arg(long, default_value = "32/8/128/16")]
    heads: String,
}

impl Measure for Args {
    fn name(&self) -> &'static str {
        "transfer"
    }

    fn measure(&self, timer: &mut Timer<'_>, formats: &[PageFormat], rows: &mut Vec<Row>) -> anyhow::Result<()> {
        let device = timer.device;
        for &format in formats {
            let one: Cast = format!("1x1:{}", self.heads).parse()?;
            let tokens = one.geometry(1, format)?.page_tokens() * self.pages;
            let cast: Cast = format!("2x{tokens}:{}", self.heads).parse()?;
            let scene = Scene::new(device, &mut timer.stream, &cast, format)?;
            let record = scene.record;
            let bytes = u64::from(self.pages) * record.bytes();
            let buffer = device.alloc("bench records", u64::from(self.pages) * record.frame_stride())?;
            let records = || Place::Records { buffer: &buffer, offset: 0, stride: record.frame_stride() };
            let frames = || Place::Frames(scene.arena());
            let pairs = scene.frames[0].iter().zip(&scene.frames[1]);
            let copies: Vec<Move> = pairs.map(|(&from, &to)| Move { from, to }).collect();
            let gathers: Vec<Move> = scene.frames[0].iter().zip(0..).map(|(&from, to)| Move { from, to }).collect();
            let transfers = [
                ("copy", Transfer { record, from: frames(), to: frames(), moves: &copies }),
                ("gather", Transfer { record, from: frames(), to: records(), moves: &gathers }),
            ];
            for flush in Flush::BOTH {
                let copy = timer.copy_us(flush, bytes)?;
                for (op, transfer) in &transfers {
                    let us = timer.median_us(flush, |stream| device.transfer(stream, transfer))?;
                    let shape = format!("{} pages of {}", self.pages, self.heads);
                    let row = Row::kernel(op, shape, format.name(), device, (us, 2 * bytes));
                    rows.push(row.flushed(flush.name()).beside_us("a copy of the same bytes", copy));
                }
            }
        }
        Ok(())
    }
}
