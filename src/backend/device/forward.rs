//! How does a call reach the backend that the device is? Handles are taken out of the enums, and results put in.

use super::{Chosen, Device, DeviceEvent, DeviceHost, DeviceMemory, DeviceStream};
use crate::Result;
use crate::backend::ops::{
    Append, Arena, Attend, Channels, Fold, Matrices, Merge, Onto, Place, Project, Score, Transfer,
};
use crate::backend::{Backend, Caps, HostUse, Swap};
use std::time::Duration;

fn append<B: Chosen>(backend: &B, stream: &mut DeviceStream, args: &Append<'_, DeviceMemory>) -> Result<()> {
    let slabs = B::slabs(args.arena)?;
    let projections = args.onto.map(|onto| B::slabs(onto.projections)).transpose()?;
    let onto = match (args.onto, &projections) {
        (Some(Onto { rank, basis, projections: Arena { slab_shift, .. } }), Some(slabs)) => {
            Some(Onto { rank, basis: matrices::<B>(&basis)?, projections: Arena { slabs, slab_shift } })
        }
        _ => None,
    };
    let args = Append {
        record: args.record,
        arena: Arena { slabs: &slabs, slab_shift: args.arena.slab_shift },
        k: &B::view(args.k)?,
        v: &B::view(args.v)?,
        channels: channels::<B>(args.channels)?,
        runs: args.runs,
        onto,
        non_finite: B::take_buffer(args.non_finite)?,
        write: args.write,
    };
    backend.append(B::take_stream(stream)?, &args)
}

fn transfer<B: Chosen>(backend: &B, stream: &mut DeviceStream, args: &Transfer<'_, DeviceMemory>) -> Result<()> {
    let slabs = |place: &Place<'_, DeviceMemory>| match place {
        Place::Frames(arena) => B::slabs(*arena),
        Place::Records { .. } => Ok(Vec::new()),
    };
    let (from, to) = (slabs(&args.from)?, slabs(&args.to)?);
    let args = Transfer {
        record: args.record,
        from: place::<B>(&args.from, &from)?,
        to: place::<B>(&args.to, &to)?,
        moves: args.moves,
    };
    backend.transfer(B::take_stream(stream)?, &args)
}

fn place<'a, B: Chosen>(place: &Place<'a, DeviceMemory>, slabs: &'a [B::Buffer]) -> Result<Place<'a, B::Buffer>> {
    Ok(match *place {
        Place::Frames(arena) => Place::Frames(Arena { slabs, slab_shift: arena.slab_shift }),
        Place::Records { buffer, offset, stride } => Place::Records { buffer: B::take_buffer(buffer)?, offset, stride },
    })
}

fn attend<B: Chosen>(backend: &B, stream: &mut DeviceStream, args: &Attend<'_, DeviceMemory>) -> Result<()> {
    let slabs = B::slabs(args.arena)?;
    let args = Attend {
        record: args.record,
        arena: Arena { slabs: &slabs, slab_shift: args.arena.slab_shift },
        tables: B::take_buffer(args.tables)?,
        q: &B::view(args.q)?,
        channels: channels::<B>(args.channels)?,
        scale: args.scale,
        grain: args.grain,
        rows: args.rows,
        tiles: args.tiles,
        states: B::take_buffer(args.states)?,
    };
    backend.attend(B::take_stream(stream)?, &args)
}

fn merge<B: Chosen>(backend: &B, stream: &mut DeviceStream, args: &Merge<'_, DeviceMemory>) -> Result<()> {
    let lse = args.lse.map(B::view).transpose()?;
    let args = Merge {
        states: B::take_buffer(args.states)?,
        grain: args.grain,
        rows: args.rows,
        q_heads: args.q_heads,
        v_dim: args.v_dim,
        out: &B::view(args.out)?,
        lse: lse.as_ref(),
    };
    backend.merge(B::take_stream(stream)?, &args)
}

fn fold<B: Chosen>(backend: &B, stream: &mut DeviceStream, args: &Fold<'_, DeviceMemory>) -> Result<()> {
    let states = B::take_buffer(args.states)?;
    backend.fold(B::take_stream(stream)?, &Fold { states, rows: args.rows, q_heads: args.q_heads, v_dim: args.v_dim })
}

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
        on!(self, b => append(b, stream, args))
    }

    fn transfer(&self, stream: &mut DeviceStream, args: &Transfer<'_, DeviceMemory>) -> Result<()> {
        on!(self, b => transfer(b, stream, args))
    }

    fn attend(&self, stream: &mut DeviceStream, args: &Attend<'_, DeviceMemory>) -> Result<()> {
        on!(self, b => attend(b, stream, args))
    }

    fn merge(&self, stream: &mut DeviceStream, args: &Merge<'_, DeviceMemory>) -> Result<()> {
        on!(self, b => merge(b, stream, args))
    }

    fn fold(&self, stream: &mut DeviceStream, args: &Fold<'_, DeviceMemory>) -> Result<()> {
        on!(self, b => fold(b, stream, args))
    }

    fn finish(&self, event: &DeviceEvent) -> Result<()> {
        on!(self, b => finish(b, event))
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

fn project<B: Chosen>(backend: &B, stream: &mut DeviceStream, args: &Project<'_, DeviceMemory>) -> Result<()> {
    let (slabs, projections) = (B::slabs(args.arena)?, B::slabs(args.projections)?);
    let args = Project {
        record: args.record,
        arena: Arena { slabs: &slabs, slab_shift: args.arena.slab_shift },
        channels: channels::<B>(args.channels)?,
        rank: args.rank,
        basis: matrices::<B>(&args.basis)?,
        projections: Arena { slabs: &projections, slab_shift: args.projections.slab_shift },
        runs: args.runs,
    };
    backend.project(B::take_stream(stream)?, &args)
}

fn score<B: Chosen>(backend: &B, stream: &mut DeviceStream, args: &Score<'_, DeviceMemory>) -> Result<()> {
    let projections = B::slabs(args.projections)?;
    let args = Score {
        geometry: args.geometry,
        rank: args.rank,
        projections: Arena { slabs: &projections, slab_shift: args.projections.slab_shift },
        q: &B::view(args.q)?,
        basis: matrices::<B>(&args.basis)?,
        queries: B::take_buffer(args.queries)?,
        entries: args.entries,
        out: B::take_buffer(args.out)?,
    };
    backend.score(B::take_stream(stream)?, &args)
}

fn channels<'a, B: Chosen>(given: Option<Channels<'a, DeviceMemory>>) -> Result<Option<Channels<'a, B::Buffer>>> {
    match given {
        Some(Channels { buffer, offset }) => Ok(Some(Channels { buffer: B::take_buffer(buffer)?, offset })),
        None => Ok(None),
    }
}

fn matrices<'a, B: Chosen>(basis: &Matrices<'a, DeviceMemory>) -> Result<Matrices<'a, B::Buffer>> {
    Ok(Matrices { buffer: B::take_buffer(basis.buffer)?, offset: basis.offset, head_stride: basis.head_stride })
}
