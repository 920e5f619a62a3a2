// SPDX-License-Identifier: MIT
//! Tests owners of sequences, Debug output, and setters of options.
mod common;
use common::*;
use std::sync::Arc;
use std::time::Duration;
use tandem::*;

#[test]
fn a_sequence_goes_with_its_owner() {
    let world = World::new(40, 1);
    let n_sequences = || world.cache.stats().unwrap().n_sequences;
    let mut session = world.session("all");
    let prompt = Sequence::new(&world.cache).unwrap();
    world.cache.append(prompt.id(), 0, kv(&world.k), Some(kv(&world.v))).unwrap();
    let fork = prompt.fork().unwrap();
    assert_eq!(n_sequences(), 3);
    let name = prompt.id();
    drop(prompt);
    assert_eq!(n_sequences(), 2);
    refused(world.cache.length(name, 0), Status::NotFound, "sequence", &name.to_raw().to_string());
    let (q, mut o) = (numbers(Q_HEADS * DIM, 3), vec![f32::NAN; Q_HEADS * DIM]); // shared pages are now the fork's
    session.attend(Attend::new(0, &[fork.id()], &[1], heads(&q), heads_mut(&mut o))).unwrap();
    close(&o, &reference(&q, &world.k, &world.v).0);

    let id = fork.into_id();
    assert_eq!(world.cache.length(id, 0).unwrap(), 40);
    let adopted = Sequence::adopt(&world.cache, id);
    assert_eq!((adopted.id(), adopted.cache().as_ptr()), (id, world.cache.as_ptr()));
    let step = session.step(&[id], &[1]).unwrap();
    let (adopted, error) = adopted.close().unwrap_err();
    assert_eq!(error.status(), Status::Busy);
    drop(step);
    adopted.close().map_err(|refused| refused.1).unwrap();
    assert_eq!(n_sequences(), 1);
}

/// An owner keeps its cache alive. Dropping it is harmless if its sequence is already gone.
#[test]
fn an_owner_outlives_the_rest() {
    let world = World::new(1, 1);
    let mine = Sequence::new(&world.cache).unwrap();
    let gone = Sequence::new(&world.cache).unwrap();
    world.cache.drop_sequence(gone.id()).unwrap();
    drop(gone);
    drop(world);
    assert_eq!(mine.cache().stats().unwrap().n_sequences, 2);
}

#[test]
fn every_value_can_be_shown() {
    let world = World::new(10, 1);
    let mut session = world.session("all");
    let shown = format!("{:?} {:?} {:?} {session:?}", world.engine, world.model, world.cache);
    let handles = [world.engine.as_ptr().cast(), world.model.as_ptr().cast(), world.cache.as_ptr().cast::<u8>()];
    for handle in handles.iter().chain(&[session.as_ptr().cast()]) {
        assert!(shown.contains(&format!("{handle:?}")), "{shown} does not say {handle:?}");
    }
    for name in ["Engine", "Model", "Cache", "Session"] {
        assert!(shown.contains(&format!("{name} {{ handle: 0x")), "{shown} does not say {name}");
    }
    let (q, mut o, ids) = (numbers(Q_HEADS * DIM, 3), vec![0f32; Q_HEADS * DIM], [world.sequence]);
    let args = Attend::new(0, &ids, &[1], heads(&q), heads_mut(&mut o));
    assert!(format!("{args:?}").contains("[1, 8, 64]"));
    assert!(format!("{:?}", session.step(&ids, &[1]).unwrap()).starts_with("Step { session: Some(Session"));
    let sequence = Sequence::adopt(&world.cache, world.sequence);
    assert!(format!("{sequence:?}").contains(&format!("{:?}", world.sequence)));
    // unwrap_err() on a constructor's result needs Debug for the value.
    assert_eq!(Engine::new(&EngineOptions::new().n_threads(-1)).unwrap_err().field(), "n_threads");
    let options = EngineOptions::new().log(Arc::new(|_, _| ())).spin(Duration::from_micros(7));
    let shown = format!("{options:?}");
    assert!(shown.contains("log: Some(0x") && shown.contains("spin: Some(7µs)"), "{shown}");
}

#[test]
fn setters_set_their_members() {
    let mut options = SessionOptions::default();
    options.policy = "hgca".to_string();
    options.window_tokens = 0;
    options.streaming_heads = vec![true, false];
    options.pruning = Some(Pruning::new().decode([PruningRecord::new()]));
    let set = SessionOptions::new().policy("hgca").window_tokens(0).streaming_heads([true, false]);
    assert_eq!(set.pruning(Pruning::new().decode([PruningRecord::new()])), options);
    let layer = LayerOptions::new(8, 2, 64).sinks([0.5; 8]).rope(Rope::Halves).soft_cap(30.0);
    assert_eq!((layer.n_q_heads, layer.n_kv_heads, layer.k_head_dim), (8, 2, 64));
    assert_eq!((layer.sinks, layer.rope, layer.soft_cap), (Some(vec![0.5; 8]), Rope::Halves, 30.0));
}
