// SPDX-License-Identifier: MIT
//! Compares policy "hip" with double precision and with "all", and tests which options are refused.
mod common;
use common::*;
use tandem::*;

const N: usize = 3000;
const NEEDLE: usize = 1234; // a token outside of sinks and window

/// Attends 16 sinks, a window of 64 tokens, and `keep_tokens` others in chunks of 8.
fn record(keep_tokens: i64) -> PruningRecord {
    PruningRecord::new().sink_tokens(16).window_tokens(64).stages(vec![PruningStage::new(Judge::Bounds, 8, keep_tokens)])
}

fn options(policy: &str, pruning: Pruning) -> SessionOptions {
    SessionOptions::new().policy(policy).pruning(pruning)
}

/// The last query, its output, and all keys and values.
struct Decoded {
    q: Vec<f32>,
    o: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Appends N tokens to a new sequence, then one more. In each group, the key of token NEEDLE is a multiple of the last
/// query's first head.
fn decode(world: &World, session: &mut Session) -> Decoded {
    let (q, v) = (numbers((N + 1) * Q_HEADS * DIM, 3), numbers((N + 1) * KV_HEADS * DIM, 5));
    let (mut k, mut o) = (numbers((N + 1) * KV_HEADS * DIM, 4), vec![f32::NAN; q.len()]);
    let last = &q[N * Q_HEADS * DIM..];
    let needle = &mut k[NEEDLE * KV_HEADS * DIM..][..KV_HEADS * DIM];
    needle.iter_mut().zip(first_heads(last)).for_each(|(to, from)| *to = 8.0 * from);
    let ids = [world.cache.create_sequence().unwrap()];
    for range in [0..N, N..N + 1] {
        let of = |n_heads: usize| range.start * n_heads * DIM..range.end * n_heads * DIM;
        let lens = [range.len() as i64];
        let args = Attend::new(0, &ids, &lens, heads(&q[of(Q_HEADS)]), heads_mut(&mut o[of(Q_HEADS)]));
        session.attend(args.append(kv(&k[of(KV_HEADS)]), kv(&v[of(KV_HEADS)]))).unwrap();
    }
    assert!(o.iter().all(|x| x.is_finite()));
    Decoded { q: last.to_vec(), o: o.split_off(N * Q_HEADS * DIM), k, v }
}

/// Returns the first query head of each group.
fn first_heads(all: &[f32]) -> Vec<f32> {
    all.chunks(Q_HEADS / KV_HEADS * DIM).flat_map(|group| group[..DIM].to_vec()).collect()
}

#[test]
fn small_records_keep_what_counts() {
    let world = World::new(0, 1);
    let pruning = Pruning::new().preset("3k-fast").decode(vec![record(64)]).append(vec![record(64)]);
    let mut session = Session::new(&world.cache, &options("hip", pruning)).unwrap();
    let Decoded { q, o, k, v } = decode(&world, &mut session);
    let expected: Vec<f32> = reference(&q, &k, &v).0.iter().map(|&x| x as f32).collect();
    let found: Vec<f64> = first_heads(&expected).iter().map(|&x| x.into()).collect();
    close(&first_heads(&o), &found);
    let difference = o.iter().zip(&expected).map(|(got, all)| (got - all).abs()).fold(0.0, f32::max);
    assert!(difference > 1e-2, "{difference}: nothing was pruned");
    assert!(session.stats().unwrap().n_refreshes > 0);
}

#[test]
fn records_that_keep_everything_attend_as_all_does() {
    let world = World::new(0, 1);
    let all = decode(&world, &mut world.session("all")).o;
    let all: Vec<f64> = all.iter().map(|&x| x.into()).collect();
    let everything = Pruning::new().decode(vec![record(4096)]).append(vec![record(4096)]);
    // The preset keeps 4096 tokens in a model's first layers.
    let paper = Pruning::new().preset("3k").shared_lists(true);
    for pruning in [everything, paper] {
        let mut session = Session::new(&world.cache, &options("hip", pruning)).unwrap();
        close(&decode(&world, &mut session).o, &all);
    }
}

#[test]
fn records_of_layers() {
    let world = World::new(0, 3);
    let session = |pruning| Session::new(&world.cache, &options("hip", pruning));
    let three = Pruning::new().decode([64, 128, 256].map(record).to_vec()).append(vec![record(64)]);
    session(three.clone()).unwrap();
    session(Pruning::default()).unwrap();
    let mut wrong = three.clone();
    wrong.decode[2].stages.push(PruningStage::new(Judge::Exact, 16, 64));
    refused(session(wrong), Status::InvalidArgument, "pruning.decode[2].stages[1].chunk_tokens", "= 16");
    let two = three.clone().decode(three.decode[1..].to_vec());
    refused(session(two), Status::InvalidArgument, "pruning.n_decode", "= 2");
}

#[test]
fn what_is_refused() {
    let world = World::new(0, 1);
    let session = |policy: &str, pruning| Session::new(&world.cache, &options(policy, pruning));
    let preset = |preset: &str| Pruning::new().preset(preset);
    refused(session("hip", preset("4k")), Status::NotFound, "pruning.preset", "4k");
    refused(session("hip", preset("3k\0")), Status::InvalidArgument, "pruning.preset", "zero byte");
    refused(session("all", Pruning::default()), Status::InvalidArgument, "pruning", "no layer");
    let invalid = |pruning, field: &str, message| {
        refused(session("hip", pruning), Status::InvalidArgument, &format!("pruning.{field}"), message);
    };
    let in_append = |record| Pruning::new().append(vec![record]);
    invalid(in_append(PruningRecord::default()), "append[0].n_stages", "= 0");
    invalid(in_append(record(64).window_tokens(15)), "append[0].window_tokens", "= 15");
    invalid(in_append(record(64).sink_tokens(-2)), "append[0].sink_tokens", "= -2");
    let stage = record(64).stages[0];
    let second = |stage, member: &str, message| {
        let record = record(64).stages(vec![PruningStage::new(Judge::Exact, 8, 64), stage]);
        let in_decode = Pruning::new().decode(vec![record]);
        invalid(in_decode, &format!("decode[0].stages[1].{member}"), message);
    };
    second(PruningStage::new(Judge::Descent, 3, 64), "chunk_tokens", "= 3");
    second(stage.query_block(3), "query_block", "= 3");
    second(stage.plus_next(true).keep_tokens(24), "keep_tokens", "= 24");
    second(stage.refresh_interval(-1), "refresh_interval", "= -1");
    second(stage.from_tokens(-9), "from_tokens", "= -9");
    second(stage.from_tokens(9).to_tokens(9), "to_tokens", "= 9");
}

/// The engine's functions for memory plans and support read the pruning options too.
#[test]
fn plans_know_pruning() {
    let world = World::new(0, 1);
    let bytes = |pruning| {
        let options = options("hip", pruning);
        let plan = world.engine.plan_memory(&world.model, None, Some(&options), &[N as i64]).unwrap();
        plan.memory.host_session_bytes
    };
    let descent = record(64).stages(vec![PruningStage::new(Judge::Descent, 8, 64)]);
    let with = |record: PruningRecord| bytes(Pruning::new().decode(vec![record.clone()]).append(vec![record]));
    let n_bounds = (N / 8 * KV_HEADS * 4 * DIM) as i64;
    let difference = with(record(64)) - with(descent);
    assert!(difference >= n_bounds, "{difference} bytes of bounds, should be {n_bounds}");
    world.engine.supports(Some(&layer()), None, Some(&options("hip", Pruning::default()))).unwrap();
}
