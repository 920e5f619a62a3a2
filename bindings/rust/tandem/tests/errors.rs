// SPDX-License-Identifier: MIT
//! Bad input gives a status, a field and a message with the value. Tests each status that can be provoked without a device.
//!
//! `InvalidHandle` is tested by a raw call, because the types of this crate rule it out. `DeviceLost` and `Internal` need a
//! device that returns them, and are tested in device.rs. `Io` and `Corrupt` are tested in device.rs and saving.rs.
mod common;
use common::*;
use std::ops::ControlFlow;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr::{null_mut, NonNull};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};
use tandem::*;

const INVALID: Status = Status::InvalidArgument;

#[test]
fn statuses_have_the_library_s_numbers() {
    let names: Vec<&str> = (-16..0).map(|code| Status::from_code(code).name()).collect();
    assert!(names.iter().all(|name| name.starts_with("TANDEM_ERROR_")));
    for code in -20..0 {
        assert_eq!(Status::from_code(code).code(), code);
        assert_eq!(matches!(Status::from_code(code), Status::Other(_)), code < -16);
    }
    assert_eq!(Status::Busy.name(), "TANDEM_ERROR_BUSY");
    assert_eq!(Status::Other(-17).name(), "unknown status");
}

#[test]
fn engine_options() {
    let new = |change: fn(&mut EngineOptions)| {
        let mut options = EngineOptions::default();
        change(&mut options);
        Engine::new(&options)
    };
    refused(new(|o| o.n_threads = -1), INVALID, "n_threads", "-1");
    refused(new(|o| o.matmul_rows = -3), INVALID, "matmul_rows", "-3");
    refused(new(|o| o.cpu_isa = Some("z80".into())), Status::NotFound, "cpu_isa", "z80");
    refused(new(|o| o.cpu_isa = Some("a\0b".into())), INVALID, "cpu_isa", "zero byte");
    refused(new(|o| o.backend = Some("abacus".into())), Status::Backend, "backend", "abacus");
    refused(new(|o| o.backend_path = Some("/x".into())), INVALID, "backend_path", "/x");
}

#[test]
fn model_options() {
    let new = |change: fn(&mut LayerOptions)| {
        let mut options = layer();
        change(&mut options);
        Model::new(&[layer(), options])
    };
    refused(Model::new(&[]), INVALID, "n_layers", "0");
    refused(new(|o| o.n_kv_heads = 3), INVALID, "layers[1].n_q_heads", "8");
    refused(new(|o| o.k_head_dim = 65), Status::Unsupported, "layers[1].k_head_dim", "65");
    refused(new(|o| o.sinks = Some(vec![0.0; 7])), INVALID, "sinks", "has 7 values, must have n_q_heads = 8");
    refused(new(|o| o.rope_inv_freq = Some(vec![1.0; 31])), INVALID, "rope_inv_freq", "rope_dims / 2 = 32");
    let rope = layer().rope(Rope::Halves).rope_inv_freq(vec![1.0; 32]).sinks(vec![0.0; 8]);
    assert_eq!(Model::new(&[rope]).unwrap().n_layers(), 1);
}

#[test]
fn cache_and_session_options() {
    let world = World::new(10, 2);
    let cache = |options: CacheOptions| Cache::new(&world.engine, &world.model, &options);
    refused(cache(CacheOptions::new().page_tokens(48)), INVALID, "page_tokens", "48");
    refused(cache(CacheOptions::new().host_cap_bytes(-1)), INVALID, "host_cap_bytes", "-1");
    refused(cache(CacheOptions::new().host_cap_bytes(1000)), Status::Capacity, "host_cap_bytes", "1000");
    let short = CacheOptions::new().layer_v_types(vec![Dtype::F16]);
    refused(cache(short), INVALID, "layer_v_types", "has 1 values, must have n_layers = 2");
    let mixed = CacheOptions::new().layer_k_types(vec![Dtype::F16, Dtype::Q4_0]);
    cache(mixed).unwrap();
    let hidden = CacheOptions::new().layer_k_types(vec![Dtype::F16, Dtype::Q4_64]);
    refused(cache(hidden), Status::Unsupported, "layer_k_types[1]", "q4_64");

    let session = |options: SessionOptions| Session::new(&world.cache, &options);
    refused(session(SessionOptions::new().policy("dice")), Status::NotFound, "policy", "dice");
    refused(session(SessionOptions::new().policy("a\0")), INVALID, "policy", "zero byte");
    refused(session(SessionOptions::new().window_tokens(-2)), INVALID, "window_tokens", "-2");
    refused(session(SessionOptions::new().alpha(f32::NAN)), INVALID, "alpha", "nan");
}

#[test]
fn sequences() {
    let world = World::new(10, 1);
    let (cache, s, unknown) = (&world.cache, world.sequence, SequenceId::from_raw(1000));
    refused(cache.digest(unknown), Status::NotFound, "sequence", "1000");
    refused(cache.length(s, 1), INVALID, "layer_idx", "1");
    refused(cache.truncate(s, 11), INVALID, "n_tokens", "11");
    refused(cache.remove(s, 5, 1, true), Status::Unsupported, "shift_positions", "1");
    refused(cache.reserve(s, i64::MAX), Status::Capacity, "n_tokens", "9223372036854775807");
    refused(cache.read(s, 0, 0, None, None), INVALID, "k", "NULL");
    let mut k = vec![0f32; 11 * KV_HEADS * DIM];
    let view = TensorMut::new(&mut k, &[11, KV_HEADS, DIM]).unwrap();
    assert_eq!(cache.read(s, 0, 0, Some(view), None).unwrap_err().status(), INVALID);
    refused(cache.append(s, 0, kv(&world.k), None), INVALID, "v", "NULL");
    assert_eq!(cache.length(s, 0).unwrap(), 10);
}

#[test]
fn attend_arguments() {
    let world = World::new(10, 1);
    let (mut session, s) = (world.session("all"), world.sequence);
    let (q, mut o) = (numbers(Q_HEADS * DIM, 3), vec![f32::NAN; Q_HEADS * DIM]);
    let mut attend = |ids: &[SequenceId], lens: &[i64], change: &dyn for<'a> Fn(Attend<'a>) -> Attend<'a>| {
        session.attend(change(Attend::new(0, ids, lens, heads(&q), heads_mut(&mut o))))
    };
    let same: &dyn for<'a> Fn(Attend<'a>) -> Attend<'a> = &|args| args;
    refused(attend(&[s], &[1, 1], same), INVALID, "q_lens", "has 2 values for 1 sequences");
    refused(attend(&[s], &[2], same), INVALID, "q.shape[0]", "must be the sum of q_lens = 2");
    refused(attend(&[s], &[-1], same), INVALID, "q_lens[0]", "-1");
    refused(attend(&[s, s], &[1, 0], same), INVALID, "sequences", "twice");
    refused(attend(&[SequenceId::from_raw(99)], &[1], same), Status::NotFound, "sequences", "99");
    refused(attend(&[s], &[1], &|args| args.speculative()), INVALID, "k", "nothing to append");
    refused(attend(&[s], &[1], &|args| args.tree(&[-1, 0])), INVALID, "parent_idx", "has 2 values");
    refused(attend(&[s], &[i64::MAX], &|args| args.tree(&[-1])), INVALID, "parent_idx", "has 1 values");
    assert!(o.iter().all(|x| x.is_nan()));
    let (wide, mut o) = (numbers(Q_HEADS * 80, 3), vec![f32::NAN; Q_HEADS * DIM]);
    let wide = TensorRef::new(&wide, &[1, Q_HEADS, 80]).unwrap();
    refused(session.attend(Attend::new(0, &[s], &[1], wide, heads_mut(&mut o))), INVALID, "q.shape[2]", "80");
    refused(session.attend(Attend::new(7, &[s], &[1], heads(&q), heads_mut(&mut o))), INVALID, "layer_idx", "7");
    refused(session.commit(s, &[0]), Status::InvalidState, "sequence", "no speculative tokens");
    refused(session.selection(s, 0, 2), INVALID, "kv_head_idx", "2");
    assert!(session.step(&[s], &[1, 2]).is_err());
    refused(
        world.engine.merge(heads_mut(&mut o), TensorMut::new(&mut [0f32; 8], &[1, 8]).unwrap(), &[]),
        INVALID,
        "n_states",
        "0",
    );
}

#[test]
fn named_keys() {
    let world = World::new(10, 1);
    let (q, mut o, ids) = (numbers(Q_HEADS * DIM, 3), vec![f32::NAN; Q_HEADS * DIM], [world.sequence]);
    let mut attend = |policy: &str, selection: Selection<'_>| {
        let args = Attend::new(0, &ids, &[1], heads(&q), heads_mut(&mut o));
        world.session(policy).attend(args.selection(selection))
    };
    let idx = |idx: &'static [i32], n_heads: usize| Selection::new(idx, &[1, n_heads, idx.len() / n_heads]).unwrap();
    refused(attend("all", idx(&[0, 1, 2, 10], 2)), INVALID, "selection.idx", "selection.idx[0, 1, 1] = 10 names no token");
    refused(attend("all", idx(&[4, 3], 1)), INVALID, "selection.idx", "selection.idx[0, 0, 1] = 3 is less");
    refused(attend("all", idx(&[4, 2, 4], 1).any_order()), INVALID, "selection.idx", "= 4 stands there twice");
    refused(attend("all", idx(&[-1, 3], 1)), INVALID, "selection.idx", "stands behind a pad of -1");
    refused(attend("all", idx(&[0, 1, 2], 3)), INVALID, "selection.idx.shape[1]", "3, must be 1 or n_kv_heads = 2");
    let of_two = Selection::new(&[0, 1], &[2, 1, 1]).unwrap();
    refused(attend("all", of_two), INVALID, "selection.idx.shape[0]", "2");
    refused(attend("all", idx(&[0], 1).unit_tokens(3)), INVALID, "selection.unit_tokens", "3");
    refused(attend("streaming", idx(&[0], 1)), Status::Unsupported, "selection", "streaming");
    assert!(o.iter().all(|x| x.is_nan()));
    refused(Selection::new(&[0; 5], &[1, 2, 3]), INVALID, "data", "has 5 elements, shape [1, 2, 3] reaches 6");
    refused(Selection::strided(&[0; 6], &[2, 1, 3], &[4, 3, 1]), INVALID, "data", "strides [4, 3, 1] reaches 7");
    let too_many = Selection::new(&[0], &[1 << 40, 1 << 40, 1]);
    refused(too_many, INVALID, "shape", "more than memory");
}

/// Stops a call by a flag and by the callback, whose panic comes out of the call. Then the same call succeeds.
#[test]
fn a_call_that_is_stopped() {
    let world = World::new(10, 1);
    let (mut session, ids, n) = (world.session("all"), [world.sequence], 500);
    let (q, k, v) = (numbers(n * Q_HEADS * DIM, 3), numbers(n * KV_HEADS * DIM, 4), numbers(n * KV_HEADS * DIM, 5));
    let mut o = vec![f32::NAN; q.len()];
    let mut attend =
        |o: &mut [f32], flag: Option<&AtomicI32>, listener: &mut (dyn FnMut(i64, i64) -> ControlFlow<()> + Send + Sync)| {
            let mut progress = Progress::new(listener);
            let mut args = Attend::new(0, &ids, &[500], heads(&q), heads_mut(o)).append(kv(&k), kv(&v));
            if let Some(flag) = flag {
                args = args.cancel(flag);
            }
            session.attend(args.progress(&mut progress))
        };
    let (flag, mut go_on) = (AtomicI32::new(1), |_, _| ControlFlow::Continue(()));
    refused(attend(&mut o, Some(&flag), &mut go_on), Status::Cancelled, "cancel", "was stopped");
    flag.store(0, Ordering::SeqCst);
    let stop = attend(&mut o, Some(&flag), &mut |_, _| ControlFlow::Break(()));
    refused(stop, Status::Cancelled, "progress", "was stopped");
    let panicked = catch_unwind(AssertUnwindSafe(|| attend(&mut o, None, &mut |_, _| panic!("as the test wants"))));
    assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"as the test wants"));
    assert!(o.iter().all(|x| x.is_nan()));
    assert_eq!(world.cache.length(world.sequence, 0).unwrap(), 10);
    let mut seen = Vec::new();
    attend(&mut o, Some(&flag), &mut |done, total| {
        seen.push((done, total));
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(seen.windows(2).all(|two| two[0].0 <= two[1].0) && seen.last().is_some_and(|last| last.0 == last.1));
    let (k, v) = ([&world.k[..], &k].concat(), [&world.v[..], &v].concat());
    close(&o[(n - 1) * Q_HEADS * DIM..], &reference(&q[(n - 1) * Q_HEADS * DIM..], &k, &v).0);
}

#[test]
fn a_sequence_in_flight_is_busy() {
    let world = World::new(10, 1);
    let (mut one, mut other, ids) = (world.session("all"), world.session("all"), [world.sequence]);
    let step = one.step(&ids, &[1]).unwrap();
    refused(other.step(&ids, &[1]).map(drop), Status::Busy, "sequences", "in flight");
    refused(world.cache.truncate(world.sequence, 0), Status::Busy, "sequence", "in flight");
    drop(step);
    drop(one);
    world.cache.truncate(world.sequence, 0).unwrap();
}

/// Tensors in device memory reach the library unchanged. An engine without a device refuses them.
#[test]
fn device_tensors_without_a_device() {
    let world = World::new(10, 1);
    let (q, mut o) = (numbers(Q_HEADS * DIM, 3), vec![0f32; Q_HEADS * DIM]);
    let raw = sys::tandem_tensor { device_type: sys::TANDEM_DEVICE_CUDA, ..*heads(&q).as_raw() };
    // SAFETY: refused before it is read.
    let q = unsafe { TensorRef::from_raw(raw) };
    let args = Attend::new(0, std::slice::from_ref(&world.sequence), &[1], q, heads_mut(&mut o));
    refused(world.session("all").attend(args), Status::Unsupported, "q.device_type", "no device");
}

#[test]
fn handles_are_checked_by_the_library() {
    let world = World::new(1, 1);
    let foreign = world.cache.as_ptr().cast::<sys::tandem_engine>();
    // SAFETY: handles are compared without being dereferenced.
    let status = unsafe { sys::tandem_engine_drain(foreign, 0, null_mut()) };
    assert_eq!(Status::from_code(status), Status::InvalidHandle);
}

/// An allocator that can be told to refuse, and to wait in requests of other threads.
struct Heap {
    refuses: AtomicBool,
    waits: AtomicBool,
    waiting: AtomicBool,
    owner: std::thread::ThreadId,
}

// SAFETY: the memory is the system allocator's.
unsafe impl HostAllocator for Heap {
    fn alloc(&self, bytes: usize, alignment: usize) -> Option<NonNull<u8>> {
        while self.waits.load(Ordering::SeqCst) && std::thread::current().id() != self.owner {
            self.waiting.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(bytes > 0 && !self.refuses.load(Ordering::SeqCst), "a panic counts as a refusal");
        assert!(alignment <= 4096); // one alignment for all, so that free() knows it
        let layout = std::alloc::Layout::from_size_align(bytes, 4096).ok()?;
        // SAFETY: not 0 bytes.
        NonNull::new(unsafe { std::alloc::alloc(layout) })
    }
    unsafe fn free(&self, data: NonNull<u8>, bytes: usize) {
        // SAFETY: as alloc() made it.
        unsafe { std::alloc::dealloc(data.as_ptr(), std::alloc::Layout::from_size_align_unchecked(bytes, 4096)) }
    }
}

fn heap() -> (&'static Heap, EngineOptions) {
    let no = || AtomicBool::new(false);
    let owner = std::thread::current().id();
    let heap = &*Box::leak(Box::new(Heap { refuses: no(), waits: no(), waiting: no(), owner }));
    let options = EngineOptions::new().n_threads(2).pin_threads(false);
    (heap, options.allocator(Allocator::new(heap)))
}

#[test]
fn an_allocator_that_panics_refuses() {
    let (heap, options) = heap();
    let world = World::on(Engine::new(&options).unwrap(), 10, 1);
    heap.refuses.store(true, Ordering::SeqCst);
    let error = world.cache.reserve(world.sequence, 100_000).unwrap_err();
    assert_eq!(error.status(), Status::OutOfMemory, "{error}");
    heap.refuses.store(false, Ordering::SeqCst);
    world.cache.reserve(world.sequence, 100_000).unwrap();
}

/// A background selection waits for memory, and a drain returns after its timeout.
#[test]
fn a_drain_that_takes_too_long() {
    let (heap, options) = heap();
    let world = World::on(Engine::new(&options).unwrap(), 0, 1);
    let options = SessionOptions::new().policy("hgca").window_tokens(16).sink_tokens(0).beta(0.0);
    let mut session = Session::new(&world.cache, &options).unwrap();
    let (q, k, v) = (numbers(Q_HEADS * DIM, 3), numbers(KV_HEADS * DIM, 4), numbers(KV_HEADS * DIM, 5));
    let mut o = vec![f32::NAN; q.len()];
    heap.waits.store(true, Ordering::SeqCst);
    let end = Instant::now() + Duration::from_secs(60);
    // Another thread drains, because the append after the one that started the selection waits for it.
    let drained = std::thread::scope(|scope| {
        let engine = &world.engine;
        let drain = scope.spawn(move || {
            while !heap.waiting.load(Ordering::SeqCst) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
            let drained = engine.drain(Some(Duration::from_millis(20)));
            heap.waits.store(false, Ordering::SeqCst);
            drained
        });
        while heap.waits.load(Ordering::SeqCst) {
            let args = Attend::new(0, std::slice::from_ref(&world.sequence), &[1], heads(&q), heads_mut(&mut o));
            session.attend(args.append(kv(&k), kv(&v))).unwrap();
        }
        drain.join().unwrap()
    });
    refused(drained, Status::Timeout, "timeout_ns", "timeout_ns = 20000000");
    world.engine.drain(None).unwrap();
}

/// Starts more threads than there is stack space for, in a process of its own with limited address space.
#[test]
fn threads_that_cannot_be_started() {
    const VARIABLE: &str = "TANDEM_TEST_LIMITED";
    if std::env::var_os(VARIABLE).is_none() {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let output = command.args(["--exact", "threads_that_cannot_be_started"]).env(VARIABLE, "1").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
        return;
    }
    extern "C" {
        fn setrlimit(resource: i32, limit: *const [u64; 2]) -> i32;
    }
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
    // SAFETY: RLIMIT_AS and a struct of two numbers.
    assert_eq!(unsafe { setrlimit(9, &[pages * 4096 + (512 << 20); 2]) }, 0);
    const EAGAIN: i64 = 11;
    let error = Engine::new(&EngineOptions::new().n_threads(1000)).map(drop).unwrap_err();
    assert_eq!((error.status(), error.underlying()), (Status::System, EAGAIN), "{error}");
}
