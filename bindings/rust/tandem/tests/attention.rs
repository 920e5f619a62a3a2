// SPDX-License-Identifier: MIT
//! Compares every call with double precision, or with what the header says about it.
mod common;
use common::*;
use tandem::*;

const N: usize = 300;

/// Attends one query over the sequence's keys and returns o and lse.
fn decode(session: &mut Session, sequence: SequenceId, q: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (mut o, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; Q_HEADS]);
    let lse_view = TensorMut::new(&mut lse, &[1, Q_HEADS]).unwrap();
    session.attend(Attend::new(0, &[sequence], &[1], heads(q), heads_mut(&mut o)).lse(lse_view)).unwrap();
    (o, lse)
}

#[test]
fn decode_is_softmax_attention() {
    let world = World::new(N, 1);
    let q = numbers(Q_HEADS * DIM, 3);
    let (o, lse) = decode(&mut world.session("all"), world.sequence, &q);
    let expected = reference(&q, &world.k, &world.v);
    close(&o, &expected.0);
    close(&lse, &expected.1);
}

/// q, k and v are interleaved in one buffer, two sequences share a call, and the rows of o have gaps. The gaps stay
/// untouched.
#[test]
fn strided_tensors_of_two_sequences() {
    let world = World::new(N, 1);
    let other = world.cache.create_sequence().unwrap();
    let (mut session, row) = (world.session("all"), (Q_HEADS + 2 * KV_HEADS) * DIM);
    let qkv = numbers(3 * row, 4);
    let view = |first: usize, n| TensorRef::strided(&qkv[first..], &[3, n, DIM], &[row, DIM, 1]).unwrap();
    let (k_first, v_first) = (Q_HEADS * DIM, (Q_HEADS + KV_HEADS) * DIM);
    let mut o = vec![7f32; 3 * row];
    let o_view = TensorMut::strided(&mut o, &[3, Q_HEADS, DIM], &[row, DIM, 1]).unwrap();
    let (ids, lens) = ([other, world.sequence], [2, 1]);
    let args = Attend::new(0, &ids, &lens, view(0, Q_HEADS), o_view);
    session.attend(args.append(view(k_first, KV_HEADS), view(v_first, KV_HEADS))).unwrap();

    let token = |i: usize, first: usize| qkv[i * row + first..][..KV_HEADS * DIM].to_vec();
    let (k, v) = ([0, 1, 2].map(|i| token(i, k_first)), [0, 1, 2].map(|i| token(i, v_first)));
    let contexts = [
        (k[0].clone(), v[0].clone()),
        ([&k[0][..], &k[1]].concat(), [&v[0][..], &v[1]].concat()),
        ([&world.k[..], &k[2]].concat(), [&world.v[..], &v[2]].concat()),
    ];
    for (i, (k, v)) in contexts.iter().enumerate() {
        let (o, gap) = o[i * row..][..row].split_at(Q_HEADS * DIM);
        close(o, &reference(&qkv[i * row..], k, v).0);
        assert!(gap.iter().all(|&x| x == 7.0));
    }
    assert_eq!(world.cache.length(other, 0).unwrap(), 2);
}

#[test]
fn sixteen_bits_and_blocks() {
    let world = World::new(0, 1);
    let (q, k, v) = (numbers(Q_HEADS * DIM, 5), numbers(8 * KV_HEADS * DIM, 6), numbers(8 * KV_HEADS * DIM, 7));
    let bf16 = |data: &[f32]| data.iter().map(|x| Bf16((x.to_bits() >> 16) as u16)).collect::<Vec<_>>();
    let wide = |data: &[Bf16]| data.iter().map(|x| f32::from_bits(u32::from(x.0) << 16)).collect::<Vec<_>>();
    let (k, v) = (bf16(&k), bf16(&v));
    let shape = [8, KV_HEADS, DIM];
    let (k_view, v_view) = (TensorRef::new(&k, &shape).unwrap(), TensorRef::new(&v, &shape).unwrap());
    world.cache.append(world.sequence, 0, k_view, Some(v_view)).unwrap();
    let expected = reference(&q, &wide(&k), &wide(&v));
    close(&decode(&mut world.session("all"), world.sequence, &q).0, &expected.0);

    // Reads K in its own type and as blocks, and appends the blocks to another sequence.
    let mut back = vec![Bf16(0x7fc0); k.len()];
    let mut blocks = vec![BlockQ8_0([0xff; 34]); k.len() / 32];
    world.cache.read(world.sequence, 0, 0, Some(TensorMut::new(&mut back, &shape).unwrap()), None).unwrap();
    world.cache.read(world.sequence, 0, 0, Some(TensorMut::new(&mut blocks, &shape).unwrap()), None).unwrap();
    assert_eq!(back, k);
    let other = world.cache.create_sequence().unwrap();
    world.cache.append(other, 0, TensorRef::new(&blocks, &shape).unwrap(), Some(v_view)).unwrap();
    let mut rounded = vec![f32::NAN; k.len()];
    world.cache.read(other, 0, 0, Some(TensorMut::new(&mut rounded, &shape).unwrap()), None).unwrap();
    for (rounded, given) in rounded.iter().zip(wide(&k)) {
        assert!((rounded - given).abs() <= 0.5 / 127.0 + 1e-3, "{rounded}, given {given}");
    }
}

#[test]
fn sequences_fork_shrink_and_are_read() {
    let world = World::new(N, 2);
    let (cache, sequence) = (&world.cache, world.sequence);
    let fork = cache.fork(sequence).unwrap();
    assert_ne!(fork, sequence);
    assert_eq!(cache.digest(fork).unwrap(), cache.digest(sequence).unwrap());
    assert!(cache.stats().unwrap().n_pages_shared > 0);
    cache.truncate(fork, 100).unwrap();
    cache.remove(fork, 10, 20, false).unwrap();
    assert_ne!(cache.digest(fork).unwrap(), cache.digest(sequence).unwrap());
    assert_eq!(
        [cache.length(fork, 0).unwrap(), cache.length(fork, 1).unwrap(), cache.length(sequence, 0).unwrap()],
        [80, 80, 300]
    );
    let (mut k, mut v) = (vec![f32::NAN; 5 * KV_HEADS * DIM], vec![f32::NAN; 5 * KV_HEADS * DIM]);
    let shape = [5, KV_HEADS, DIM];
    let (k_view, v_view) = (TensorMut::new(&mut k, &shape).unwrap(), TensorMut::new(&mut v, &shape).unwrap());
    cache.read(fork, 1, 8, Some(k_view), Some(v_view)).unwrap(); // tokens 8, 9, 30, 31, 32
    let token = KV_HEADS * DIM;
    assert_eq!(k, [&world.k[8 * token..10 * token], &world.k[30 * token..33 * token]].concat());
    assert_eq!(v, [&world.v[8 * token..10 * token], &world.v[30 * token..33 * token]].concat());
    cache.reserve(fork, 1000).unwrap();
    cache.drop_sequence(fork).unwrap();
    assert_eq!(cache.stats().unwrap().n_sequences, 1);
    assert_eq!(SequenceId::from_raw(sequence.to_raw()), sequence);
}

/// A step that is dropped before every layer has its tokens is rolled back. A complete step keeps them.
#[test]
fn steps_end_with_their_guard() {
    let world = World::new(N, 2);
    let mut session = world.session("all");
    let (q, k, v) = (numbers(Q_HEADS * DIM, 8), numbers(KV_HEADS * DIM, 9), numbers(KV_HEADS * DIM, 10));
    let (ids, mut o) = ([world.sequence], vec![f32::NAN; Q_HEADS * DIM]);
    let lengths = || [0, 1].map(|layer_idx| world.cache.length(world.sequence, layer_idx).unwrap());
    let mut attend = |step: &mut Step<'_>, layer_idx| {
        step.attend(Attend::new(layer_idx, &ids, &[1], heads(&q), heads_mut(&mut o)).append(kv(&k), kv(&v)))
    };
    let mut step = session.step(&ids, &[1]).unwrap();
    attend(&mut step, 0).unwrap();
    drop(step);
    assert_eq!(lengths(), [300, 300]);
    let mut step = session.step(&ids, &[1]).unwrap();
    attend(&mut step, 0).unwrap();
    refused(step.end(), Status::InvalidState, "q_lens", "layer 1");
    assert_eq!(lengths(), [300, 300]);
    let mut step = session.step(&ids, &[1]).unwrap();
    attend(&mut step, 0).unwrap();
    refused(attend(&mut step, 0), Status::InvalidState, "q_lens", "0 left in layer 0");
    attend(&mut step, 1).unwrap();
    step.end().unwrap();
    assert_eq!(lengths(), [301, 301]);
    close(&o, &reference(&q, &[&world.k[..], &k].concat(), &[&world.v[..], &v].concat()).0);
}

#[test]
fn speculation_keeps_a_chain_of_the_tree() {
    let world = World::new(N, 1);
    let (mut session, ids) = (world.session("all"), [world.sequence]);
    let (q, k, v) = (numbers(3 * Q_HEADS * DIM, 11), numbers(3 * KV_HEADS * DIM, 12), numbers(3 * KV_HEADS * DIM, 13));
    let mut o = vec![f32::NAN; 3 * Q_HEADS * DIM];
    let args = Attend::new(0, &ids, &[3], heads(&q), heads_mut(&mut o)).append(kv(&k), kv(&v));
    session.attend(args.tree(&[-1, -1, 1])).unwrap(); // token 2 is a child of token 1; token 0 is a sibling of token 1
    assert_eq!(world.cache.length(world.sequence, 0).unwrap(), 300);
    let token = KV_HEADS * DIM;
    let kept = ([&world.k[..], &k[token..]].concat(), [&world.v[..], &v[token..]].concat());
    let expected = reference(&q[2 * Q_HEADS * DIM..], &kept.0, &kept.1).0;
    close(&o[2 * Q_HEADS * DIM..], &expected);
    refused(
        session.commit(world.sequence, &[0, 2]),
        Status::InvalidArgument,
        "kept_idx",
        "kept_idx[1] = 2 continues token 1",
    );
    session.commit(world.sequence, &[1, 2]).unwrap();
    assert_eq!(world.cache.length(world.sequence, 0).unwrap(), 302);
    close(&decode(&mut session, world.sequence, &q[2 * Q_HEADS * DIM..]).0, &expected);
}

/// Checks that each query of each KV head attends exactly its named keys.
fn attends_named(world: &World, q: &[f32], selection: Selection<'_>, named: impl Fn(usize, usize) -> Vec<usize>) {
    let (n, mut o) = (q.len() / (Q_HEADS * DIM), vec![f32::NAN; q.len()]);
    let (ids, lens) = ([world.sequence], [n as i64]);
    let args = Attend::new(0, &ids, &lens, heads(q), heads_mut(&mut o));
    world.session("all").attend(args.selection(selection)).unwrap();
    let (token, group) = (KV_HEADS * DIM, Q_HEADS / KV_HEADS * DIM);
    for (i, (q, o)) in q.chunks(Q_HEADS * DIM).zip(o.chunks(Q_HEADS * DIM)).enumerate() {
        for head in 0..KV_HEADS {
            let rows = |all: &[f32]| {
                named(i, head).iter().flat_map(|&key| all[key * token..][..token].to_vec()).collect::<Vec<_>>()
            };
            let expected = reference(q, &rows(&world.k), &rows(&world.v)).0;
            close(&o[head * group..][..group], &expected[head * group..][..group]);
        }
    }
}

#[test]
fn named_keys_are_attended_alone() {
    let world = World::new(N, 1);
    let q = numbers(2 * Q_HEADS * DIM, 18); // of tokens 298 and 299
    let idx = [3, 40, 298, 7, 8, -1, 5, 6, 299, 0, -1, -1]; // [2, 2, 3]
    let named = |i: usize, head: usize| {
        let row = &idx[(i * KV_HEADS + head) * 3..][..3];
        row.iter().filter(|&&key| key >= 0).map(|&key| key as usize).collect()
    };
    attends_named(&world, &q, Selection::new(&idx, &[2, 2, 3]).unwrap(), named);
    // The same rows with gaps between them.
    let apart: Vec<i32> = idx.chunks(3).flat_map(|row| [row, &[9999, 9999]].concat()).collect();
    attends_named(&world, &q, Selection::strided(&apart, &[2, 2, 3], &[10, 5, 1]).unwrap(), named);
    // Pages of 32 tokens, the same for all KV heads. A query sees the tokens of the last page up to its own.
    let pages = [9, 2, 2, 9];
    let selection = Selection::new(&pages, &[2, 1, 2]).unwrap().unit_tokens(32).any_order();
    attends_named(&world, &q, selection, |i, _| (64..96).chain(288..299 + i).collect());
    let sinks_and_window = |i: usize, _| (0..16).chain(64..96).chain(235 + i..299 + i).collect();
    attends_named(&world, &q, selection.plus_window(), sinks_and_window);
}

#[test]
fn a_query_without_named_keys_gives_nothing() {
    let world = World::new(N, 1);
    let (q, mut o, mut lse) = (numbers(Q_HEADS * DIM, 19), vec![f32::NAN; Q_HEADS * DIM], [f32::NAN; Q_HEADS]);
    let (ids, lse_view) = ([world.sequence], TensorMut::new(&mut lse, &[1, Q_HEADS]).unwrap());
    let args = Attend::new(0, &ids, &[1], heads(&q), heads_mut(&mut o)).lse(lse_view);
    world.session("all").attend(args.selection(Selection::new(&[-1, -1], &[1, 2, 1]).unwrap())).unwrap();
    assert!(o.iter().all(|&x| x == 0.0) && lse.iter().all(|&x| x == f32::NEG_INFINITY));
}

/// States over two halves merge into the state over both: into other memory, and into the first state.
#[test]
fn states_merge() {
    let world = World::new(N, 1);
    let (q, half) = (numbers(Q_HEADS * DIM, 14), 150 * KV_HEADS * DIM);
    let state = |k: &[f32], v: &[f32]| {
        let sequence = world.cache.create_sequence().unwrap();
        world.cache.append(sequence, 0, kv(k), Some(kv(v))).unwrap();
        decode(&mut world.session("all"), sequence, &q)
    };
    let (mut a, b) = (state(&world.k[..half], &world.v[..half]), state(&world.k[half..], &world.v[half..]));
    let (mut o, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; Q_HEADS]);
    fn lse_ref(lse: &[f32]) -> TensorRef<'_> {
        TensorRef::new(lse, &[1, Q_HEADS]).unwrap()
    }
    fn lse_mut(lse: &mut [f32]) -> TensorMut<'_> {
        TensorMut::new(lse, &[1, Q_HEADS]).unwrap()
    }
    let states = [(heads(&a.0), lse_ref(&a.1)), (heads(&b.0), lse_ref(&b.1))];
    world.engine.merge(heads_mut(&mut o), lse_mut(&mut lse), &states).unwrap();
    let expected = reference(&q, &world.k, &world.v);
    close(&o, &expected.0);
    close(&lse, &expected.1);
    world.engine.merge_into(heads_mut(&mut a.0), lse_mut(&mut a.1), &[(heads(&b.0), lse_ref(&b.1))]).unwrap();
    assert_eq!((a.0, a.1), (o, lse));
}

#[test]
fn policies_select_and_count() {
    let world = World::new(0, 1);
    let (mut session, ids) = (world.session("hgca"), [world.sequence]);
    let q = numbers(N * Q_HEADS * DIM, 15);
    let (k, v) = (numbers(N * KV_HEADS * DIM, 16), numbers(N * KV_HEADS * DIM, 17));
    let mut o = vec![f32::NAN; q.len()];
    session.attend(Attend::new(0, &ids, &[300], heads(&q), heads_mut(&mut o)).append(kv(&k), kv(&v))).unwrap();
    let last = (N - 1) * Q_HEADS * DIM;
    close(&o[last..], &reference(&q[last..], &k, &v).0); // an append attends everything
    let selected = session.selection(world.sequence, 0, 1).unwrap();
    assert!(selected.windows(2).all(|pair| pair[0] < pair[1]) && selected.len() <= N);
    assert!((0..16).chain(237..300).all(|token| selected.contains(&token))); // sinks and window
    let (token_idx, maw) = session.selection_with_maw(world.sequence, 0, 1, 3).unwrap();
    assert_eq!((token_idx, maw.len()), (selected.clone(), selected.len()));
    let total: f32 = maw.iter().sum();
    assert!(selected.len() == 80 || (total - 1.0).abs() < 1e-4, "{total}");
    let stats = session.stats().unwrap();
    assert_eq!((stats.n_attends, stats.n_query_tokens, stats.n_refreshes > 0), (1, 300, true));
    // The next query is itself one of the 64 tokens of the window.
    let mut streaming = world.session("streaming");
    assert_eq!(streaming.selection(world.sequence, 0, 0).unwrap(), (0..16).chain(237..300).collect::<Vec<i64>>());
    // One of the KV heads streams, the other does not.
    let mut options = SessionOptions::new().window_tokens(64).sink_tokens(16);
    options.streaming_heads = (0..KV_HEADS).map(|head| head == 1).collect();
    let mut session = Session::new(&world.cache, &options).unwrap();
    assert_eq!(session.selection(world.sequence, 0, 0).unwrap().len(), 300);
    assert_eq!(session.selection(world.sequence, 0, 1).unwrap(), (0..16).chain(237..300).collect::<Vec<i64>>());
    let by_layer = options.clone().layer_policies(vec!["streaming".into()]);
    let by_layer = by_layer.streaming_heads(Vec::new());
    let mut session = Session::new(&world.cache, &by_layer).unwrap();
    assert_eq!(session.selection(world.sequence, 0, 0).unwrap(), (0..16).chain(237..300).collect::<Vec<i64>>());
    let unknown = by_layer.layer_policies(vec!["nothing".into()]);
    refused(Session::new(&world.cache, &unknown), Status::NotFound, "layer_policies[0]", "nothing");
    options.streaming_heads.push(false);
    refused(Session::new(&world.cache, &options), Status::InvalidArgument, "n_streaming_heads", "3");
    world.engine.drain(None).unwrap();
}

#[test]
fn plans_and_capabilities() {
    let world = World::new(N, 2);
    let options = CacheOptions::new().k_type(Dtype::F32).page_tokens(16);
    let plan = world.engine.plan_memory(&world.model, Some(&options), None, &[300]).unwrap();
    assert_eq!((plan.memory.host_kv_bytes, plan.exceeds.is_none()), (world.cache.stats().unwrap().host_kv_bytes, true));
    assert!(plan.report().unwrap().contains(&format!("\"host_kv_bytes\":{}", plan.memory.host_kv_bytes)));
    let capped = options.host_cap_bytes(1 << 20);
    let plan = world.engine.plan_memory(&world.model, Some(&capped), None, &[1 << 20]).unwrap();
    assert_eq!(plan.exceeds.map(|error| error.status()), Some(Status::Capacity));
    assert!(plan.memory.host_kv_bytes > 1 << 20);

    let engine = &world.engine;
    engine.supports(Some(&layer()), Some(&CacheOptions::default()), Some(&SessionOptions::default())).unwrap();
    let odd = layer().k_head_dim(65);
    refused(engine.supports(Some(&odd), None, None), Status::Unsupported, "layer.k_head_dim", "65");
    assert!(engine.report().unwrap().starts_with("{\"version\":\"0.2."));
    assert_eq!(version().0, 0);
    assert_eq!(policy_names().collect::<Vec<_>>(), ["all", "streaming", "hgca", "hip", "patterns"]);
    assert!(cpu_isa_names().any(cpu_isa_available));
    assert!(!cpu_isa_available("z80") && !cpu_isa_available("av\0x2"));
}
