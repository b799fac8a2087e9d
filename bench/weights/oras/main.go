// Pulls one artifact with oras-go as the oras command does (file store, three blobs at once) and reports its cost.
// Usage: oraspull [push] HOST/REPOSITORY:TAG FOLDER [CA]; plain HTTP without a CA. With SYNC=1 every file is also brought onto
// the disk, three at once, and that counts.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	oras "oras.land/oras-go/v2"
	"oras.land/oras-go/v2/content/file"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
)

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func synced(folder string, most int) {
	found, err := os.ReadDir(folder)
	must(err)
	var all sync.WaitGroup
	turns := make(chan struct{}, most)
	for _, one := range found {
		all.Go(func() {
			turns <- struct{}{}
			file, err := os.Open(filepath.Join(folder, one.Name()))
			must(err)
			must(file.Sync())
			must(file.Close())
			<-turns
		})
	}
	all.Wait()
	names, err := os.Open(folder)
	must(err)
	must(names.Sync())
	must(names.Close())
}

// All files of a folder as one artifact, for tests of what other clients push.
func push(reference string, folder string) {
	repository, err := remote.NewRepository(reference)
	must(err)
	repository.PlainHTTP = true
	store, err := file.New(folder)
	must(err)
	found, err := os.ReadDir(folder)
	must(err)
	pack := oras.PackManifestOptions{}
	for _, one := range found {
		layer, err := store.Add(context.Background(), one.Name(), "application/octet-stream", "")
		must(err)
		pack.Layers = append(pack.Layers, layer)
	}
	made, err := oras.PackManifest(context.Background(), store, oras.PackManifestVersion1_1, "application/vnd.test.model", pack)
	must(err)
	tag := repository.Reference.Reference
	must(store.Tag(context.Background(), made, tag))
	_, err = oras.Copy(context.Background(), store, tag, repository, tag, oras.DefaultCopyOptions)
	must(err)
}

func main() {
	if os.Args[1] == "push" {
		push(os.Args[2], os.Args[3])
		return
	}
	repository, err := remote.NewRepository(os.Args[1])
	must(err)
	repository.PlainHTTP = len(os.Args) < 4
	if !repository.PlainHTTP {
		pem, err := os.ReadFile(os.Args[3])
		must(err)
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(pem)
		transport := http.DefaultTransport.(*http.Transport).Clone()
		transport.TLSClientConfig = &tls.Config{RootCAs: roots}
		repository.Client = &auth.Client{Client: &http.Client{Transport: transport}}
	}
	store, err := file.New(os.Args[2])
	must(err)
	options := oras.DefaultCopyOptions
	options.Concurrency = 3
	begun := time.Now()
	_, err = oras.Copy(context.Background(), repository, repository.Reference.Reference, store, "", options)
	must(err)
	must(store.Close())
	if os.Getenv("SYNC") != "" {
		synced(os.Args[2], options.Concurrency)
	}
	wall := time.Since(begun).Seconds()
	var used syscall.Rusage
	must(syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	cpu := float64(used.Utime.Nano()+used.Stime.Nano()) / 1e9
	status, err := os.ReadFile("/proc/self/status") // Maxrss may be that of the program which started this one
	must(err)
	var rss float64
	_, line, _ := strings.Cut(string(status), "VmHWM:")
	fmt.Sscan(line, &rss)
	fmt.Printf("{\"wall_s\": %f, \"cpu_s\": %f, \"rss_mib\": %f}\n", wall, cpu, rss/1024)
}
