// A map of linked records in Go's heap, which its collector walks while goroutines look things up and sleep between signals.
package main

import (
	"fmt"
	"hash/fnv"
	"os"
	"runtime"
	"sort"
	"strconv"
	"sync"
)

type record struct {
	name    string
	next    *record
	payload [6]uint64
}

func main() {
	count, _ := strconv.Atoi(os.Args[1])
	records := make(map[string]*record)
	var last *record
	for i := 0; i < count; i++ {
		r := &record{name: "key" + strconv.Itoa(i*7919%count), next: last}
		for j := range r.payload {
			r.payload[j] = uint64(i) * uint64(j+1)
		}
		records[r.name] = r
		last = r
	}
	runtime.GC()
	var group sync.WaitGroup
	sums := make([]uint64, 4)
	for g := range sums {
		group.Add(1)
		go func(g int) {
			defer group.Done()
			for i := g; i < count; i += len(sums) {
				if r := records["key"+strconv.Itoa(i)]; r != nil {
					sums[g] += r.payload[5]
				}
			}
		}(g)
	}
	group.Wait()
	// A fault of its own, which its handler for SIGSEGV turns into a panic.
	func() {
		defer func() { fmt.Println("recovered:", recover()) }()
		var nothing *record
		fmt.Println(nothing.next)
	}()
	keys := make([]string, 0, len(records))
	for key := range records {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	hash := fnv.New64a()
	for _, key := range keys {
		hash.Write([]byte(key))
	}
	length := 0
	for r := last; r != nil; r = r.next {
		length++
	}
	fmt.Println(len(records), sums, length, hash.Sum64())
}
