// SPDX-License-Identifier: MIT
//! Tests which objects keep others alive, on which threads, and what happens to a panic in a callback.
mod common;
use common::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use tandem::*;

fn send_and_sync<T: Send + Sync>() {}

#[test]
fn threads_as_documented() {
    send_and_sync::<Engine>();
    send_and_sync::<Model>();
    send_and_sync::<Cache>();
    send_and_sync::<Session>();
    send_and_sync::<Step<'static>>();
    send_and_sync::<Weights>();
    send_and_sync::<WeightsBlock<'static>>();
    send_and_sync::<LayerOptions>();
    send_and_sync::<TensorRef<'static>>();
    send_and_sync::<TensorMut<'static>>();
    send_and_sync::<EngineOptions>();
    send_and_sync::<Error>();
}

fn decode(session: &mut Session, sequence: SequenceId, q: &[f32]) -> Vec<f32> {
    let mut o = vec![f32::NAN; q.len()];
    session.attend(Attend::new(0, &[sequence], &[1], heads(q), heads_mut(&mut o))).unwrap();
    o
}

/// Drops engine, model, cache and session in every order, and uses the rest after each.
#[test]
fn teardown_in_any_order() {
    let q = numbers(Q_HEADS * DIM, 3);
    for order in 0..24usize {
        let world = World::new(40, 1);
        let expected = reference(&q, &world.k, &world.v).0;
        let (session, cache, sequence) = (world.session("hgca"), world.cache.clone(), world.sequence);
        let (mut engine, mut model, mut cache, mut session) =
            (Some(world.engine.clone()), Some(world.model.clone()), Some(cache), Some(session));
        drop(world);
        let mut left = vec![0, 1, 2, 3];
        for digit in [order % 4, order / 4 % 3, order / 12, 0] {
            match left.remove(digit) {
                0 => engine = None,
                1 => model = None,
                2 => cache = None,
                _ => session = None,
            }
            if let Some(session) = &mut session {
                close(&decode(session, sequence, &q), &expected);
            }
            if let Some(cache) = &cache {
                assert_eq!(cache.length(sequence, 0).unwrap(), 40);
            }
            if let Some(engine) = &engine {
                engine.drain(None).unwrap();
            }
        }
        assert!(engine.is_none() && model.is_none() && cache.is_none() && session.is_none());
    }
}

/// A step that is never ended ends with its session.
#[test]
fn a_forgotten_step_ends_with_the_session() {
    let world = World::new(40, 1);
    let mut session = world.session("all");
    std::mem::forget(session.step(&[world.sequence], &[1]).unwrap());
    refused(session.step(&[world.sequence], &[1]).map(drop), Status::InvalidState, "session", "open already");
    drop(session);
    world.cache.truncate(world.sequence, 10).unwrap();
}

/// Eight threads share one engine and one cache, each with its own session. One session moves from thread to thread.
#[test]
fn eight_threads_on_one_engine() {
    let world = World::new(200, 1);
    let run = |seed: u64| {
        let sequence = world.cache.fork(world.sequence).unwrap();
        let (mut session, mut k, mut v) = (world.session("all"), world.k.clone(), world.v.clone());
        for i in 0..20 {
            let seed = 100 * seed + 4 * i;
            let (new_k, new_v) = (numbers(KV_HEADS * DIM, seed), numbers(KV_HEADS * DIM, seed + 1));
            let (q, mut o) = (numbers(Q_HEADS * DIM, seed + 2), vec![f32::NAN; Q_HEADS * DIM]);
            let args = Attend::new(0, std::slice::from_ref(&sequence), &[1], heads(&q), heads_mut(&mut o));
            session.attend(args.append(kv(&new_k), kv(&new_v))).unwrap();
            k.extend(&new_k);
            v.extend(&new_v);
            close(&o, &reference(&q, &k, &v).0);
        }
        world.cache.drop_sequence(sequence).unwrap();
    };
    std::thread::scope(|scope| (1..=8).for_each(|seed| drop(scope.spawn(move || run(seed)))));
    assert_eq!(world.cache.stats().unwrap().n_sequences, 1);

    let q = numbers(Q_HEADS * DIM, 3);
    let (mut session, expected) = (world.session("all"), reference(&q, &world.k, &world.v).0);
    for _ in 0..4 {
        let (q, expected, sequence) = (q.clone(), expected.clone(), world.sequence);
        let moved = std::thread::spawn(move || {
            close(&decode(&mut session, sequence, &q), &expected);
            session
        });
        session = moved.join().unwrap();
    }
}

/// System memory, but none for other threads' requests. Background selections then stay unchanged, which is logged.
struct NoneElsewhere(std::thread::ThreadId, std::sync::atomic::AtomicBool);

// SAFETY: the memory is the system allocator's.
unsafe impl HostAllocator for NoneElsewhere {
    fn alloc(&self, bytes: usize, alignment: usize) -> Option<std::ptr::NonNull<u8>> {
        if self.1.load(Ordering::SeqCst) && std::thread::current().id() != self.0 {
            return None;
        }
        assert!(alignment <= 4096); // one alignment for all, so that free() knows it
        let layout = std::alloc::Layout::from_size_align(bytes.max(1), 4096).ok()?;
        // SAFETY: not 0 bytes.
        std::ptr::NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })
    }
    unsafe fn free(&self, data: std::ptr::NonNull<u8>, bytes: usize) {
        // SAFETY: as alloc() made it.
        unsafe { std::alloc::dealloc(data.as_ptr(), std::alloc::Layout::from_size_align_unchecked(bytes.max(1), 4096)) }
    }
}

/// The library logs, the log panics, and the call still returns. The log is dropped with its last owner and not before.
#[test]
fn a_panic_in_the_log_stays_there() {
    let heap: &'static NoneElsewhere =
        Box::leak(Box::new(NoneElsewhere(std::thread::current().id(), std::sync::atomic::AtomicBool::new(false))));
    let n_messages = Arc::new(AtomicUsize::new(0));
    let counter = n_messages.clone();
    let log: Log = Arc::new(move |level, message| {
        counter.fetch_add(1, Ordering::SeqCst);
        panic!("{level:?}: {message}");
    });
    let options = EngineOptions::new().n_threads(1).allocator(Allocator::new(heap)).log(log);
    let world = World::on(Engine::new(&options).unwrap(), 0, 1);
    drop(options);
    let (cache, sequence) = (world.cache.clone(), world.sequence);
    // beta = 0 keeps every key, so each eviction has a key to copy.
    let session = SessionOptions::new().policy("hgca").window_tokens(16).sink_tokens(0).beta(0.0);
    let mut session = Session::new(&cache, &session).unwrap();
    drop((world, cache)); // the session keeps the log alive
    heap.1.store(true, Ordering::SeqCst);
    let (q, k, v) = (numbers(Q_HEADS * DIM, 3), numbers(KV_HEADS * DIM, 4), numbers(KV_HEADS * DIM, 5));
    let mut o = vec![f32::NAN; q.len()];
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while n_messages.load(Ordering::SeqCst) == 0 && std::time::Instant::now() < end {
        session.attend(Attend::new(0, &[sequence], &[1], heads(&q), heads_mut(&mut o)).append(kv(&k), kv(&v))).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(1)); // time for the background to make the selection
    }
    assert!(n_messages.load(Ordering::SeqCst) > 0);
    close(&o, &expected(&v).collect::<Vec<f64>>());
    assert_eq!(Arc::strong_count(&n_messages), 2);
    drop(session);
    assert_eq!(Arc::strong_count(&n_messages), 1); // the closure is gone
}

/// Expected output: all values are equal, so whatever the weights, o is the value of the query head's KV head.
fn expected(v: &[f32]) -> impl Iterator<Item = f64> + '_ {
    (0..Q_HEADS).flat_map(|head| v[head / (Q_HEADS / KV_HEADS) * DIM..][..DIM].iter().map(|&x| f64::from(x)))
}
