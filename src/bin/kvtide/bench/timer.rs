//! How long does one call take on the device, with its data out of the cache?

use super::median;
use kvtide::backend::{DeviceMemory, DeviceStream};
use kvtide::{Backend, Device};
use std::time::{Duration, Instant};

/// Bytes that push everything else out of a device's cache.
const FLUSH_BYTES: u64 = 256 << 20;

/// How long a device is kept busy before calls are timed: idle ones slow their clock down, and come back late.
const WARM_UP: Duration = Duration::from_millis(100);

/// What empties the cache before a timed call. One that writes leaves lines that the call must write back first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flush {
    /// A fill.
    W,
    /// A read.
    R,
}

impl Flush {
    pub(super) const BOTH: [Flush; 2] = [Flush::W, Flush::R];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Flush::W => "W",
            Flush::R => "R",
        }
    }
}

/// Measures calls on a stream of its own, by device events where the backend has them.
#[derive(Debug)]
pub(super) struct Timer<'a> {
    pub(super) device: &'a Device,
    pub(super) stream: DeviceStream,
    flush: DeviceMemory,
    pub(super) total: DeviceMemory,
    pub(super) repeats: u32,
    /// Whether the device tells the time of a call; else it is the host's, with what it takes to hand the call over.
    told: bool,
}

impl<'a> Timer<'a> {
    pub(super) fn new(device: &'a Device, repeats: u32) -> anyhow::Result<Self> {
        let bytes = FLUSH_BYTES.min(device.caps().max_slab_bytes / 16 * 16);
        let (mut stream, flush) = (device.stream()?, device.alloc("bench flush", bytes)?);
        let total = device.alloc("bench total", 16)?;
        device.fill(&mut stream, &flush, 0, bytes, 0x3f80_3f80)?;
        device.fill(&mut stream, &total, 0, 16, 0)?;
        device.time(&mut stream)?;
        let began = device.record(&mut stream)?;
        device.fill(&mut stream, &total, 0, 16, 0)?;
        let ended = device.record(&mut stream)?;
        device.finish(&ended)?;
        let told = device.elapsed(&began, &ended)?.is_some();
        Ok(Timer { device, stream, flush, total, repeats, told })
    }

    /// The median of a call in microseconds, the cache emptied before each.
    pub(super) fn median_us(
        &mut self,
        flush: Flush,
        mut call: impl FnMut(&mut DeviceStream) -> kvtide::Result<()>,
    ) -> anyhow::Result<f64> {
        let mut pairs = Vec::new();
        let mut walls = Vec::new();
        let warm_up = self.repeats.min(10);
        self.warm_up(flush)?;
        for round in 0..warm_up + self.repeats {
            self.empty(flush)?;
            if !self.told {
                // Without them the wait before the call is what keeps the flush out of the time.
                self.device.synchronize(&mut self.stream)?;
            }
            let (begin, began) = (Instant::now(), self.device.record(&mut self.stream)?);
            call(&mut self.stream)?;
            let ended = self.device.record(&mut self.stream)?;
            if !self.told {
                self.device.finish(&ended)?;
                walls.push(begin.elapsed().as_secs_f64() * 1e6);
            }
            if round >= warm_up {
                pairs.push((began, ended));
            }
        }
        self.device.synchronize(&mut self.stream)?;
        let mut times = Vec::new();
        for (began, ended) in &pairs {
            if let Some(time) = self.device.elapsed(began, ended)? {
                times.push(time.as_secs_f64() * 1e6);
            }
        }
        Ok(median(if times.is_empty() { walls.split_off(warm_up as usize) } else { times }))
    }

    /// Keeps the device busy up to the first round.
    fn warm_up(&mut self, flush: Flush) -> kvtide::Result<()> {
        let (begin, mut before) = (Instant::now(), None);
        while self.told && begin.elapsed() < WARM_UP {
            self.empty(flush)?;
            // One is under way while the host waits for the other.
            if let Some(event) = before.replace(self.device.record(&mut self.stream)?) {
                self.device.finish(&event)?;
            }
        }
        Ok(())
    }

    fn empty(&mut self, flush: Flush) -> kvtide::Result<()> {
        let bytes = kvtide::DeviceBuffer::bytes(&self.flush);
        match flush {
            Flush::W => self.device.fill(&mut self.stream, &self.flush, 0, bytes, 0x3f80_3f80),
            Flush::R => self.device.sum(&mut self.stream, &self.flush, bytes, &self.total),
        }
    }

    /// The time of a kernel that reads so many bytes and does nothing else.
    pub(super) fn read_us(&mut self, flush: Flush, from: &DeviceMemory, bytes: u64) -> anyhow::Result<f64> {
        let (device, total, bytes) = (self.device, self.total.clone(), bytes / 16 * 16);
        self.median_us(flush, |stream| device.sum(stream, from, bytes, &total))
    }

    /// The time of a copy that reads and writes so many bytes each.
    pub(super) fn copy_us(&mut self, flush: Flush, bytes: u64) -> anyhow::Result<f64> {
        let device = self.device;
        let (from, to) = (device.alloc("bench copy", bytes)?, device.alloc("bench copy", bytes)?);
        device.fill(&mut self.stream, &from, 0, bytes / 4 * 4, 1)?;
        self.median_us(flush, |stream| device.copy(stream, (&from, 0), (&to, 0), bytes / 4 * 4))
    }
}
