// SPDX-License-Identifier: MIT

package tandem

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The README's program is examples/smallest. go_test.sh runs it in a module of its own.
func TestReadmeShowsTheSmallestExample(t *testing.T) {
	readme := string(must(os.ReadFile("README.md")))
	example := string(must(os.ReadFile(filepath.Join("examples", "smallest", "main.go"))))
	if !strings.Contains(readme, "```go\n"+strings.TrimPrefix(example, "// SPDX-License-Identifier: MIT\n")+"```\n") {
		t.Fatal("README.md shows another program than examples/smallest/main.go")
	}
}
