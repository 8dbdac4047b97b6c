// Package proc reads what a process has used, from /proc.
package proc

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// tick is the kernel's unit of CPU time in /proc (USER_HZ), the same on every Linux that Go runs on.
const tick = 10 * time.Millisecond

// CPU is the user and system time of a process and all its threads so far.
func CPU(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, fmt.Errorf("read CPU time: %w", err)
	}
	// The name is in parentheses and may hold blanks; utime and stime are the 14th and 15th field.
	_, rest, ok := bytes.Cut(b[bytes.LastIndexByte(b, ')'):], []byte(" "))
	fields := strings.Fields(string(rest))
	if !ok || len(fields) < 13 {
		return 0, fmt.Errorf("read CPU time of %d: %q", pid, b)
	}
	user, err := strconv.ParseInt(fields[11], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read CPU time of %d: %w", pid, err)
	}
	system, err := strconv.ParseInt(fields[12], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read CPU time of %d: %w", pid, err)
	}
	return time.Duration(user+system) * tick, nil
}

// Resident is the resident memory of a process in bytes.
func Resident(pid int) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, fmt.Errorf("read memory: %w", err)
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kb, err := strconv.ParseInt(strings.Fields(v)[0], 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read memory of %d: %w", pid, err)
			}
			return kb << 10, nil
		}
	}
	return 0, fmt.Errorf("read memory of %d: no VmRSS", pid)
}

// Busy is the time all processors have spent working since boot, and with it what others on the
// machine took from a measurement can be told.
func Busy() (time.Duration, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, fmt.Errorf("read machine's CPU time: %w", err)
	}
	line, _, _ := strings.Cut(string(b), "\n")
	f := strings.Fields(line)
	if len(f) < 9 {
		return 0, fmt.Errorf("read machine's CPU time: %q", line)
	}
	var sum int64
	for i, v := range f[1:9] {
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read machine's CPU time: %w", err)
		}
		if i != 3 && i != 4 { // idle, iowait
			sum += n
		}
	}
	return time.Duration(sum) * tick, nil
}

// Machine describes the machine: processor, cores, memory.
func Machine() map[string]string {
	out := map[string]string{}
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		cores := 0
		for line := range strings.SplitSeq(string(b), "\n") {
			k, v, _ := strings.Cut(line, ":")
			switch strings.TrimSpace(k) {
			case "model name":
				out["cpu"] = strings.TrimSpace(v)
			case "processor":
				cores++
			}
		}
		out["cores"] = strconv.Itoa(cores)
	}
	if b, err := os.ReadFile("/proc/meminfo"); err == nil {
		if v, ok := strings.CutPrefix(string(b), "MemTotal:"); ok {
			v, _, _ = strings.Cut(v, "\n")
			out["memory"] = strings.TrimSpace(v)
		}
	}
	return out
}
