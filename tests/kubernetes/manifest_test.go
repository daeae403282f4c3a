// Package kubernetes tests the manifest in examples/launch against Kubernetes' own types. It is a
// module of its own, so that Tutti's has none of them.
package kubernetes

import (
	"bytes"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const manifest = "../../examples/launch/kubernetes.yaml"

// decode reads the manifest; a field that Kubernetes does not know, or one that is there twice, is
// an error.
func decode(t *testing.T, text []byte) (service corev1.Service, job batchv1.Job, err error) {
	t.Helper()
	for part := range bytes.SplitSeq(text, []byte("\n---\n")) {
		var kind metav1.TypeMeta
		if err := yaml.Unmarshal(part, &kind); err != nil {
			return service, job, err
		}
		switch kind.APIVersion + " " + kind.Kind {
		case "v1 Service":
			err = yaml.UnmarshalStrict(part, &service)
		case "batch/v1 Job":
			err = yaml.UnmarshalStrict(part, &job)
		default:
			t.Errorf("there is a %s %s", kind.APIVersion, kind.Kind)
		}
		if err != nil {
			return service, job, err
		}
	}
	return service, job, nil
}

func TestManifest(t *testing.T) {
	text, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	service, job, err := decode(t, text)
	if err != nil {
		t.Fatal(err)
	}
	spec := job.Spec
	pod := spec.Template.Spec
	if spec.CompletionMode == nil || *spec.CompletionMode != batchv1.IndexedCompletion || spec.Completions == nil ||
		spec.Parallelism == nil || *spec.Parallelism != *spec.Completions {
		t.Fatalf("not a job whose pods have numbers and run at the same time: %+v", spec)
	}
	if service.Spec.ClusterIP != corev1.ClusterIPNone || !service.Spec.PublishNotReadyAddresses ||
		service.Spec.Selector["job-name"] != job.Name || pod.Subdomain != service.Name {
		t.Errorf("the service does not give the job's pods their names: %+v, subdomain %q", service.Spec, pod.Subdomain)
	}
	if len(pod.Containers) != 1 || pod.RestartPolicy != corev1.RestartPolicyNever {
		t.Fatalf("%+v", pod)
	}
	c := pod.Containers[0]
	flag := func(name string) string {
		i := slices.Index(c.Args, name)
		if end := slices.Index(c.Args, "--"); i < 0 || i+1 >= end {
			t.Errorf("tutti run is not given %s: %q", name, c.Args)
			return ""
		}
		return c.Args[i+1]
	}
	if !slices.Equal(c.Command, []string{"tutti", "run"}) || flag("--nnodes") != strconv.Itoa(int(*spec.Completions)) ||
		flag("--node-rank") != "$(JOB_COMPLETION_INDEX)" {
		t.Errorf("%q %q", c.Command, c.Args)
	}
	port := c.Ports[0].ContainerPort
	if at := flag("--rdzv"); at != job.Name+"-0."+service.Name+":"+strconv.Itoa(int(port)) {
		t.Errorf("the pods meet at %s", at)
	}
	// The secret's file is where the volume is, and the volume is the secret's.
	secret := ""
	for _, m := range c.VolumeMounts {
		for _, v := range pod.Volumes {
			if v.Name == m.Name && v.Secret != nil && strings.HasPrefix(flag("--secret-file"), m.MountPath+"/") {
				secret = v.Secret.SecretName
			}
		}
	}
	if secret == "" || !bytes.Contains(text, []byte("create secret generic "+secret+" --from-file=secret=")) {
		t.Errorf("the secret's file comes from secret %q", secret)
	}
}

func TestUnknownFieldsAreErrors(t *testing.T) {
	text, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	wrong := bytes.Replace(text, []byte("completionMode:"), []byte("completionmodus:"), 1)
	if bytes.Equal(text, wrong) {
		t.Fatal("nothing was changed")
	}
	if _, _, err := decode(t, wrong); err == nil {
		t.Error("a field that does not exist was read")
	}
}
