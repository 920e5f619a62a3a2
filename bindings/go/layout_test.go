// SPDX-License-Identifier: MIT

package tandem

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestFingerprintIsTheLibrarys(t *testing.T) {
	check(t, checkABI())
	if here, there := fingerprint(), libraryFingerprint(2); here != there {
		t.Fatalf("%#x, the library has %#x", here, there)
	}
	if libraryFingerprint(1001) != 0 {
		t.Fatal("the library knows a minor version 1001")
	}
}

func includeFlag(t *testing.T) string {
	directory, err := exec.Command("pkg-config", "--variable=includedir", "tandem").Output()
	check(t, err)
	return "-I" + strings.ReplaceAll(strings.TrimSpace(string(directory)), `\`, "")
}

// Compares what a C program says of the installed header with what cgo has made of it.
func TestStructsAreTheHeaders(t *testing.T) {
	var program, expected strings.Builder
	program.WriteString("#include <stdio.h>\n#include <tandem/tandem.h>\nint main(void) {\n")
	for _, abiStruct := range abiStructs {
		name := abiStruct.name
		fmt.Fprintf(&program, "  printf(\"%s %%zu %%zu\\n\", sizeof(%s), offsetof(struct { char c; %s s; }, s));\n", name, name, name)
		fmt.Fprintf(&expected, "%s %d %d\n", name, abiStruct.layout.Size(), abiStruct.layout.Align())
		for _, field := range members(abiStruct.layout) {
			fmt.Fprintf(&program, "  printf(\"%s.%s %%zu %%zu\\n\", offsetof(%[1]s, %[2]s), sizeof(((%[1]s *)0)->%[2]s));\n", name, field.Name)
			fmt.Fprintf(&expected, "%s.%s %d %d\n", name, field.Name, field.Offset, field.Type.Size())
		}
	}
	program.WriteString("  return 0;\n}\n")
	source, binary := filepath.Join(t.TempDir(), "layout.c"), filepath.Join(t.TempDir(), "layout")
	check(t, os.WriteFile(source, []byte(program.String()), 0o666))
	compiler := os.Getenv("CC")
	if compiler == "" {
		compiler = "cc"
	}
	if output, err := exec.Command(compiler, includeFlag(t), "-o", binary, source).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	if printed := string(must(exec.Command(binary).Output())); printed != expected.String() {
		t.Fatalf("the C program says\n%scgo says\n%s", printed, expected.String())
	}
}

// Every function and constant of the header is used in this package, and every struct is in the table. The init functions of
// call arguments are the shim's.
func TestTheHeaderIsCovered(t *testing.T) {
	include := includeFlag(t)[2:]
	header := string(must(os.ReadFile(filepath.Join(include, "tandem", "tandem.h"))))
	for _, part := range regexp.MustCompile(`(?m)^#include "(.*)"$`).FindAllStringSubmatch(header, -1) {
		header += string(must(os.ReadFile(filepath.Join(include, part[1]))))
	}
	var sources strings.Builder
	for _, pattern := range []string{"*.go", "shim.c"} {
		for _, path := range must(filepath.Glob(pattern)) {
			if !strings.HasSuffix(path, "_test.go") {
				sources.Write(must(os.ReadFile(path)))
			}
		}
	}
	inline := map[string]bool{"tandem_tensor_init": true, "tandem_attend_args_init": true, "tandem_error_status": true,
		"tandem_attend_tensors_args_init": true, "tandem_selection_init": true}
	names := regexp.MustCompile(`(?m)^TANDEM_API [^(\n]*[ *](tandem_\w+)\(|^#define (TANDEM_\w+) [^\\\n]*$|^typedef struct (tandem_\w+) \{`)
	numbered := map[string]bool{"TANDEM_OK": true, "TANDEM_VERSION_MAJOR": true, "TANDEM_VERSION_PATCH": true, "TANDEM_API": true,
		"TANDEM_DEVICE_HOST": true, "TANDEM_LOG_ERROR": true, "TANDEM_LOG_WARNING": true, "TANDEM_LOG_INFO": true}
	nFound := 0
	for _, match := range names.FindAllStringSubmatch(header, -1) {
		function, constant, structure := match[1], match[2], match[3]
		nFound++
		switch {
		case function != "" && !inline[function] && !regexp.MustCompile(`\b`+function+`\(`).MatchString(sources.String()):
			t.Errorf("%s() is called nowhere", function)
		case constant != "" && !numbered[constant] && !strings.Contains(sources.String(), "C."+constant):
			t.Errorf("%s is used nowhere", constant)
		case structure != "" && !strings.Contains(sources.String(), `{"`+structure+`", `):
			t.Errorf("%s is not in the table of structs", structure)
		}
	}
	if nFound < 100 {
		t.Fatalf("%d names", nFound)
	}
}
