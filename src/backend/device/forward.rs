//! How does a call reach the backend that the device is? Handles are taken out of the enums, and results put in.

use super::operations::{append, attend, fold, merge, project, score, transfer};
use super::{Chosen, Device, DeviceEvent, DeviceHost, DeviceMemory, DeviceStream};
use crate::Result;
use crate::backend::ops::{Append, Arena, Attend, Fold, Merge, Project, Score, StepMemory, Transfer};
use crate::backend::{Backend, Caps, HostUse, Swap};
use crate::record::Record;
use std::time::Duration;

/// Both directions of a swap.
fn swap<B: Chosen>(
    backend: &B,
    stream: &mut DeviceStream,
    args: &Swap<'_, DeviceMemory, DeviceHost>,
    out: bool,
) -> Result<()> {
    let slabs = B::slabs(args.arena)?;
    let args = Swap {
        record: args.record,
        arena: Arena { slabs: &slabs, slab_shift: args.arena.slab_shift },
        host: B::take_host(args.host)?,
        offset: args.offset,
        stride: args.stride,
        moves: args.moves,
    };
    let stream = B::take_stream(stream)?;
    if out { backend.swap_out(stream, &args) } else { backend.swap_in(stream, &args) }
}

fn alloc_host<B: Chosen>(backend: &B, label: &str, bytes: u64, usage: HostUse) -> Result<DeviceHost> {
    backend.alloc_host(label, bytes, usage).map(B::wrap_host)
}

fn read_host<B: Chosen>(backend: &B, host: &DeviceHost, offset: u64, out: &mut [u8]) -> Result<()> {
    backend.read_host(B::take_host(host)?, offset, out)
}

fn write_host<B: Chosen>(backend: &B, host: &DeviceHost, offset: u64, data: &[u8]) -> Result<()> {
    backend.write_host(B::take_host(host)?, offset, data)
}

fn finish<B: Chosen>(backend: &B, event: &DeviceEvent) -> Result<()> {
    backend.finish(B::take_event(event)?)
}

fn time<B: Chosen>(backend: &B, stream: &mut DeviceStream) -> Result<()> {
    backend.time(B::take_stream(stream)?)
}

fn elapsed<B: Chosen>(backend: &B, from: &DeviceEvent, to: &DeviceEvent) -> Result<Option<Duration>> {
    backend.elapsed(B::take_event(from)?, B::take_event(to)?)
}

fn upload<B: Chosen>(
    backend: &B,
    stream: &mut DeviceStream,
    dst: &DeviceMemory,
    offset: u64,
    data: &[u8],
) -> Result<()> {
    backend.upload(B::take_stream(stream)?, B::take_buffer(dst)?, offset, data)
}

fn download<B: Chosen>(
    backend: &B,
    stream: &mut DeviceStream,
    src: &DeviceMemory,
    offset: u64,
    out: &mut [u8],
) -> Result<()> {
    backend.download(B::take_stream(stream)?, B::take_buffer(src)?, offset, out)
}

fn copy<B: Chosen>(
    backend: &B,
    stream: &mut DeviceStream,
    src: (&DeviceMemory, u64),
    dst: (&DeviceMemory, u64),
    bytes: u64,
) -> Result<()> {
    backend.copy(B::take_stream(stream)?, (B::take_buffer(src.0)?, src.1), (B::take_buffer(dst.0)?, dst.1), bytes)
}

fn fill<B: Chosen>(
    backend: &B,
    stream: &mut DeviceStream,
    dst: &DeviceMemory,
    offset: u64,
    bytes: u64,
    word: u32,
) -> Result<()> {
    backend.fill(B::take_stream(stream)?, B::take_buffer(dst)?, offset, bytes, word)
}

fn sum<B: Chosen>(
    backend: &B,
    stream: &mut DeviceStream,
    src: &DeviceMemory,
    bytes: u64,
    total: &DeviceMemory,
) -> Result<()> {
    backend.sum(B::take_stream(stream)?, B::take_buffer(src)?, bytes, B::take_buffer(total)?)
}

fn alloc<B: Chosen>(backend: &B, label: &str, bytes: u64) -> Result<DeviceMemory> {
    backend.alloc(label, bytes).map(B::wrap_buffer)
}

fn new_stream<B: Chosen>(backend: &B) -> Result<DeviceStream> {
    Backend::stream(backend).map(B::wrap_stream)
}

fn record<B: Chosen>(backend: &B, stream: &mut DeviceStream) -> Result<DeviceEvent> {
    backend.record(B::take_stream(stream)?).map(B::wrap_event)
}

fn wait<B: Chosen>(backend: &B, stream: &mut DeviceStream, event: &DeviceEvent) -> Result<()> {
    backend.wait(B::take_stream(stream)?, B::take_event(event)?)
}

fn is_done<B: Chosen>(backend: &B, event: &DeviceEvent) -> Result<bool> {
    backend.is_done(B::take_event(event)?)
}

fn flush<B: Chosen>(backend: &B, stream: &mut DeviceStream) -> Result<()> {
    backend.flush(B::take_stream(stream)?)
}

fn synchronize<B: Chosen>(backend: &B, stream: &mut DeviceStream) -> Result<()> {
    backend.synchronize(B::take_stream(stream)?)
}

impl Backend for Device {
    type Buffer = DeviceMemory;
    type Stream = DeviceStream;
    type Event = DeviceEvent;
    type Host = DeviceHost;

    fn caps(&self) -> &Caps {
        on!(self, b => b.caps())
    }

    fn alloc(&self, label: &str, bytes: u64) -> Result<DeviceMemory> {
        on!(self, b => alloc(b, label, bytes))
    }

    fn stream(&self) -> Result<DeviceStream> {
        on!(self, b => new_stream(b))
    }

    fn upload(&self, stream: &mut DeviceStream, dst: &DeviceMemory, offset: u64, data: &[u8]) -> Result<()> {
        on!(self, b => upload(b, stream, dst, offset, data))
    }

    fn download(&self, stream: &mut DeviceStream, src: &DeviceMemory, offset: u64, out: &mut [u8]) -> Result<()> {
        on!(self, b => download(b, stream, src, offset, out))
    }

    fn copy(
        &self,
        stream: &mut DeviceStream,
        src: (&DeviceMemory, u64),
        dst: (&DeviceMemory, u64),
        bytes: u64,
    ) -> Result<()> {
        on!(self, b => copy(b, stream, src, dst, bytes))
    }

    fn fill(&self, stream: &mut DeviceStream, dst: &DeviceMemory, offset: u64, bytes: u64, word: u32) -> Result<()> {
        on!(self, b => fill(b, stream, dst, offset, bytes, word))
    }

    fn sum(&self, stream: &mut DeviceStream, src: &DeviceMemory, bytes: u64, total: &DeviceMemory) -> Result<()> {
        on!(self, b => sum(b, stream, src, bytes, total))
    }

    fn record(&self, stream: &mut DeviceStream) -> Result<DeviceEvent> {
        on!(self, b => record(b, stream))
    }

    fn wait(&self, stream: &mut DeviceStream, event: &DeviceEvent) -> Result<()> {
        on!(self, b => wait(b, stream, event))
    }

    fn is_done(&self, event: &DeviceEvent) -> Result<bool> {
        on!(self, b => is_done(b, event))
    }

    fn flush(&self, stream: &mut DeviceStream) -> Result<()> {
        on!(self, b => flush(b, stream))
    }

    fn synchronize(&self, stream: &mut DeviceStream) -> Result<()> {
        on!(self, b => synchronize(b, stream))
    }

    fn append(&self, stream: &mut DeviceStream, args: &Append<'_, DeviceMemory>) -> Result<()> {
        on!(self, b => append(b, stream, args, None))
    }

    fn transfer(&self, stream: &mut DeviceStream, args: &Transfer<'_, DeviceMemory>) -> Result<()> {
        on!(self, b => transfer(b, stream, args))
    }

    fn attend(&self, stream: &mut DeviceStream, args: &Attend<'_, DeviceMemory>) -> Result<()> {
        on!(self, b => attend(b, stream, args, None))
    }

    fn merge(&self, stream: &mut DeviceStream, args: &Merge<'_, DeviceMemory>) -> Result<()> {
        on!(self, b => merge(b, stream, args, None))
    }

    fn fold(&self, stream: &mut DeviceStream, args: &Fold<'_, DeviceMemory>) -> Result<()> {
        on!(self, b => fold(b, stream, args))
    }

    fn append_step(
        &self,
        stream: &mut DeviceStream,
        args: &Append<'_, DeviceMemory>,
        at: &StepMemory<'_, DeviceMemory>,
    ) -> Result<()> {
        on!(self, b => append(b, stream, args, Some(at)))
    }

    fn attend_step(
        &self,
        stream: &mut DeviceStream,
        args: &Attend<'_, DeviceMemory>,
        at: &StepMemory<'_, DeviceMemory>,
    ) -> Result<()> {
        on!(self, b => attend(b, stream, args, Some(at)))
    }

    fn merge_step(
        &self,
        stream: &mut DeviceStream,
        args: &Merge<'_, DeviceMemory>,
        at: &StepMemory<'_, DeviceMemory>,
    ) -> Result<()> {
        on!(self, b => merge(b, stream, args, Some(at)))
    }

    fn finish(&self, event: &DeviceEvent) -> Result<()> {
        on!(self, b => finish(b, event))
    }

    fn prepare(&self, record: &Record, slabs: usize) {
        on!(self, b => b.prepare(record, slabs));
    }

    fn time(&self, stream: &mut DeviceStream) -> Result<()> {
        on!(self, b => time(b, stream))
    }

    fn elapsed(&self, from: &DeviceEvent, to: &DeviceEvent) -> Result<Option<Duration>> {
        on!(self, b => elapsed(b, from, to))
    }

    fn alloc_host(&self, label: &str, bytes: u64, usage: HostUse) -> Result<DeviceHost> {
        on!(self, b => alloc_host(b, label, bytes, usage))
    }

    fn read_host(&self, host: &DeviceHost, offset: u64, out: &mut [u8]) -> Result<()> {
        on!(self, b => read_host(b, host, offset, out))
    }

    fn write_host(&self, host: &DeviceHost, offset: u64, data: &[u8]) -> Result<()> {
        on!(self, b => write_host(b, host, offset, data))
    }

    fn swap_out(&self, stream: &mut DeviceStream, args: &Swap<'_, DeviceMemory, DeviceHost>) -> Result<()> {
        on!(self, b => swap(b, stream, args, true))
    }

    fn swap_in(&self, stream: &mut DeviceStream, args: &Swap<'_, DeviceMemory, DeviceHost>) -> Result<()> {
        on!(self, b => swap(b, stream, args, false))
    }

    fn project(&self, stream: &mut DeviceStream, args: &Project<'_, DeviceMemory>) -> Result<()> {
        on!(self, b => project(b, stream, args))
    }

    fn score(&self, stream: &mut DeviceStream, args: &Score<'_, DeviceMemory>) -> Result<()> {
        on!(self, b => score(b, stream, args))
    }
}
