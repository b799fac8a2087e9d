// Kubernetes' control plane for tests in one binary: testplane ROLE FLAGS...
//
// The roles are the real ones, as their modules ship them: etcd, kube-apiserver, kube-controller-manager,
// kube-scheduler and kubectl. Each reads os.Args itself, as if it were the program of that name.
package main

import (
	"fmt"
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

func main() {
	role := ""
	if len(os.Args) > 1 {
		role = os.Args[1]
		os.Args = os.Args[1:]
	}
	switch role {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(manager.NewControllerManagerCommand()))
	case "kube-scheduler":
		os.Exit(cli.Run(scheduler.NewSchedulerCommand()))
	case "kubectl":
		os.Exit(cli.Run(kubectl.NewDefaultKubectlCommand()))
	default:
		fmt.Fprintln(os.Stderr, "usage: testplane etcd|kube-apiserver|kube-controller-manager|kube-scheduler|kubectl FLAGS...")
		os.Exit(2)
	}
}
