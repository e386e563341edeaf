//! How do the arguments of an operation reach the backend that the device is? Every handle in them is taken out of its enum.

use super::{Chosen, DeviceMemory, DeviceStream};
use crate::Result;
use crate::backend::ops::{
    Append, Arena, Attend, Channels, Fold, Matrices, Merge, Onto, Place, Project, Score, StepMemory, Transfer,
};

/// A step's descriptors, where the call is one of a step.
pub(super) type At<'a> = Option<&'a StepMemory<'a, DeviceMemory>>;

fn step_memory<'a, B: Chosen>(at: &StepMemory<'a, DeviceMemory>) -> Result<StepMemory<'a, B::Buffer>> {
    let StepMemory { buffer, tiles, rows, merge, count, states } = *at;
    Ok(StepMemory { buffer: B::take_buffer(buffer)?, tiles, rows, merge, count, states })
}

pub(super) fn append<B: Chosen>(
    backend: &B,
    stream: &mut DeviceStream,
    args: &Append<'_, DeviceMemory>,
    at: At<'_>,
) -> Result<()> {
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
    let stream = B::take_stream(stream)?;
    match at {
        Some(at) => backend.append_step(stream, &args, &step_memory::<B>(at)?),
        None => backend.append(stream, &args),
    }
}

pub(super) fn transfer<B: Chosen>(
    backend: &B,
    stream: &mut DeviceStream,
    args: &Transfer<'_, DeviceMemory>,
) -> Result<()> {
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

pub(super) fn attend<B: Chosen>(
    backend: &B,
    stream: &mut DeviceStream,
    args: &Attend<'_, DeviceMemory>,
    at: At<'_>,
) -> Result<()> {
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
    let stream = B::take_stream(stream)?;
    match at {
        Some(at) => backend.attend_step(stream, &args, &step_memory::<B>(at)?),
        None => backend.attend(stream, &args),
    }
}

pub(super) fn merge<B: Chosen>(
    backend: &B,
    stream: &mut DeviceStream,
    args: &Merge<'_, DeviceMemory>,
    at: At<'_>,
) -> Result<()> {
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
    let stream = B::take_stream(stream)?;
    match at {
        Some(at) => backend.merge_step(stream, &args, &step_memory::<B>(at)?),
        None => backend.merge(stream, &args),
    }
}

pub(super) fn fold<B: Chosen>(backend: &B, stream: &mut DeviceStream, args: &Fold<'_, DeviceMemory>) -> Result<()> {
    let states = B::take_buffer(args.states)?;
    backend.fold(B::take_stream(stream)?, &Fold { states, rows: args.rows, q_heads: args.q_heads, v_dim: args.v_dim })
}

pub(super) fn project<B: Chosen>(
    backend: &B,
    stream: &mut DeviceStream,
    args: &Project<'_, DeviceMemory>,
) -> Result<()> {
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

pub(super) fn score<B: Chosen>(backend: &B, stream: &mut DeviceStream, args: &Score<'_, DeviceMemory>) -> Result<()> {
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
