// SPDX-License-Identifier: MIT

package tandem

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"
)

// A stopped call has changed nothing and returns the reason. The same call then succeeds.
func TestACallThatIsStopped(t *testing.T) {
	const n = 3000
	w := newWorld(t, 100, 1)
	session, before := w.session(t, "all"), must(w.cache.Digest(w.sequence))
	q, k, v, o := numbers(n*qToken, 3), numbers(n*kvToken, 4), numbers(n*kvToken, 5), unset(n*qToken)
	args := func(progress func(done, total int64)) *Attend {
		return &Attend{Sequences: []SequenceID{w.sequence}, QLens: []int64{n}, Q: heads(q), K: kv(k), V: kv(v), O: heads(o),
			Progress: progress}
	}
	stopped := func(err error, field string, cause error) {
		t.Helper()
		refused(t, err, ErrCancelled, field, "was stopped")
		if !errors.Is(err, cause) || errors.Is(err, ErrBusy) || o[0] == o[0] || o[len(o)-1] == o[len(o)-1] {
			t.Fatalf("%v, cause %v", err, cause)
		}
		if must(w.cache.Digest(w.sequence)) != before || listeners.count() != 0 {
			t.Fatal("the call has left something")
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	stopped(session.AttendContext(ctx, args(nil)), "cancel", context.Canceled)

	// Another goroutine cancels during the call. The callback waits until it has.
	ctx, cancel = context.WithCancel(context.Background())
	called := make(chan struct{}, 1<<20)
	go func() {
		<-called
		cancel()
	}()
	forTheFlag := func(done, total int64) { // time for the goroutine that sets the flag; the last read of the flag follows
		time.Sleep(5 * time.Millisecond)
		if done == total {
			time.Sleep(5 * time.Second)
		}
	}
	stopped(session.AttendContext(ctx, args(func(done, total int64) {
		called <- struct{}{}
		<-ctx.Done()
		forTheFlag(done, total)
	})), "cancel", context.Canceled)

	ctx, cancel = context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	stopped(session.AttendContext(ctx, args(forTheFlag)), "cancel", context.DeadlineExceeded)

	func() {
		defer func() {
			if recover() != "as the test wants" {
				t.Error("the panic is another")
			}
		}()
		check(t, session.Attend(args(func(int64, int64) { panic("as the test wants") })))
	}()

	// t.FailNow in a callback ends the goroutine that made the call, and no other.
	over, returned := make(chan struct{}), false
	go func() {
		defer close(over)
		check(t, session.Attend(args(func(int64, int64) { runtime.Goexit() })))
		returned = true
	}()
	<-over
	if returned || must(w.cache.Digest(w.sequence)) != before || listeners.count() != 0 {
		t.Fatal("the call has returned, or left something")
	}

	ctx, cancel = context.WithCancel(context.Background())
	defer cancel()
	var seen [][2]int64
	check(t, session.AttendContext(ctx, args(func(done, total int64) { seen = append(seen, [2]int64{done, total}) })))
	for i, s := range seen {
		if s[0] > s[1] || i > 0 && (s[0] < seen[i-1][0] || s[1] != seen[0][1]) {
			t.Fatalf("%v", seen)
		}
	}
	if len(seen) == 0 || seen[len(seen)-1][0] != seen[0][1] || must(w.cache.Length(w.sequence, 0)) != n+100 {
		t.Fatalf("%v", seen)
	}
	expected, _ := reference(q[(n-1)*qToken:], joined(w.k, k), joined(w.v, v))
	closeTo(t, o[(n-1)*qToken:], expected)
	o[0], o[len(o)-1] = nan, nan
	refused(t, session.Attend(&Attend{Sequences: []SequenceID{w.sequence}, QLens: []int64{1}, O: heads(o[:qToken]),
		Q: OnDevice(F32, 0, 4096, 1, qHeads, dim), Progress: func(int64, int64) {}}), ErrUnsupported, "q.device_type", "no device")
}
